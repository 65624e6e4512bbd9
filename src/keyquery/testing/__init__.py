"""Conformance suites to import: what keyquery promises, checked on your own objects."""

from keyquery.testing.forms import check_form

__all__ = ["check_form"]
