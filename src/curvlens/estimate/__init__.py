"""What can be learnt of a large operator from its products, each number with its error."""
