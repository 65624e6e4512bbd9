"""Conformance suites to import: what keyquery promises, checked on your own objects."""

from keyquery.testing.families import check_family
from keyquery.testing.forms import check_form
from keyquery.testing.kernels import check_kernel

__all__ = ["check_family", "check_form", "check_kernel"]
