import torch

from curvlens import grammar


def test_text_is_reproducible_and_within_the_vocabulary():
    one, two = grammar.batches(3, 4, 10, seed=1), grammar.batches(2, 4, 10, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=False))
    assert not torch.equal(one[0], grammar.batches(1, 4, 10, seed=2)[0])
    ids = torch.stack(grammar.batches(20, 16))
    assert ids.shape == (20, 16, grammar.LENGTH)
    assert ids.unique().tolist() == list(range(grammar.VOCABULARY))


def test_sentences_agree_in_number():
    words = grammar.text(torch.cat([b.flatten() for b in grammar.batches(10)])).split(" . ")[:-1]
    assert len(words) > 200
    plain, plural = set(grammar.VERBS), {f"{noun}s" for noun in grammar.NOUNS}
    for sentence in words:
        parts = sentence.split()
        subject = next(
            i for i, word in enumerate(parts) if word.rstrip("s") in {n.rstrip("s") for n in grammar.NOUNS}
        )
        verb = parts[subject + 1]
        assert (verb in plain or verb == "say") == (parts[subject] in plural), sentence
