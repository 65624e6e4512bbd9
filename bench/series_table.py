"""The table and the critical-difference picture of bench/series.py."""


def write_table(results):
    raise NotImplementedError
