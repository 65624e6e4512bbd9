"""Conformance tests for your own forms, layers and architectures."""

from keyquery.proof import Proof, prove
from keyquery.proof.families import check_family
from keyquery.testing.forms import check_form
from keyquery.testing.kernels import check_kernel

__all__ = ["Proof", "check_family", "check_form", "check_kernel", "prove"]
