"""What an analysis found, and how it is told: `Report`, findings, the page, the terminal."""

from curvlens.report.data import Finding, Number, Report

__all__ = ["Finding", "Number", "Report"]
