"""What fills the peak, what holds it, levers, and how plans differ: frozen records that the reports show."""

from memfit.analysis.comparison import Comparison, compare
from memfit.analysis.explain import explain
from memfit.analysis.explanation import StepExplanation
from memfit.analysis.report import Report

__all__ = ["Comparison", "Report", "StepExplanation", "compare", "explain"]
