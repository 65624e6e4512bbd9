"""The type checker that tests run under: shapes as annotated, and an int wherever a float is asked for."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
