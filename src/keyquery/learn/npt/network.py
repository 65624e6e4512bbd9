"""The network of NPT: embedding of table entries, attention across rows and columns, and output heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from keyquery.learn.inputs.tables import Rows
from keyquery.learn.layers.datapoints import DatapointEncoder, Memory


class TableNetwork(nn.Module):
    """Embeds entries (batch, n, d) as vectors (batch, n, d, e), and predicts numbers and logits from them.

        h0 = [enc(x), hidden] W_j + b_j + index_j + kind_j

    enc is the standardised number or one-hot vector of column j, and 0 if the entry is masked. `sizes` is the number of
    categories per column, 0 if numeric. The kind is left out if all columns are of one.
    """

    numeric: Bool[Tensor, " d"]
    categorical: Int[Tensor, " c"]
    first: Int[Tensor, " d"]

    def __init__(
        self, sizes: Sequence[int], embedding: int, depth: int, heads: int, dropout: float = 0.0, **options: Any
    ) -> None:
        super().__init__()
        self.sizes = tuple(sizes)
        d, total = len(self.sizes), sum(self.sizes)
        categorical = [column for column, size in enumerate(self.sizes) if size]
        first = [sum(self.sizes[:column]) for column in range(d)]  # of a column's categories among all
        self.register_buffer("numeric", torch.tensor([size == 0 for size in self.sizes]), persistent=False)
        for name, numbers in (("categorical", categorical), ("first", first)):
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.long), persistent=False)
        self.value, self.hidden, self.bias = (nn.Parameter(torch.empty(d, embedding)) for _ in range(3))
        self.category = nn.Parameter(torch.empty(total, embedding))
        self.index = nn.Parameter(torch.randn(d, embedding))
        self.kind = nn.Parameter(torch.randn(2, embedding)) if 0 < len(categorical) < d else None
        self.encoder = DatapointEncoder(d, embedding, depth, heads, dropout=dropout, **options)
        self.dropout = nn.Dropout(dropout)
        self.number = nn.Parameter(torch.empty(d, embedding))
        self.number_bias = nn.Parameter(torch.zeros(d))
        self.choice = nn.Parameter(torch.empty(total, embedding))
        self.choice_bias = nn.Parameter(torch.zeros(total))
        # As linear layers of each column are initialised.
        bounds = [[1 / math.sqrt(max(size, 1) + 1)] for size in self.sizes]
        of_categories = [bound for bound, size in zip(bounds, self.sizes, strict=True) for _ in range(size)]
        for weight in (self.value, self.hidden, self.bias, self.category):
            nn.init.uniform_(weight, -1, 1)
            weight.data.mul_(torch.tensor(of_categories if weight is self.category else bounds).view(-1, 1))
        for weight in (self.number, self.choice):
            nn.init.uniform_(weight, -(embedding**-0.5), embedding**-0.5)

    def forward(
        self,
        values: Float[Tensor, "batch n d"],
        codes: Int[Tensor, "batch n d"],
        hidden: Bool[Tensor, "batch n d"],
        memories: list[Memory] | None = None,
        seen: list[Tensor] | None = None,
    ) -> Float[Tensor, "batch n d e"]:
        """One vector per entry; with `memories`, each row attends to those and to itself only."""
        return self.dropout(self.encoder(self.embed(Rows(values, codes, hidden)), memories, seen))

    def embed(self, rows: Rows) -> Float[Tensor, "batch n d e"]:
        """Entries as vectors, before any attention."""
        values, codes, hidden = rows
        shown = ~hidden
        base = self.bias + self.index
        if self.kind is not None:
            base = base + self.kind[self.numeric.long()]
        x = base + hidden.unsqueeze(-1) * self.hidden
        x = x + values.where(shown & self.numeric, 0.0).unsqueeze(-1) * self.value
        if len(self.categorical):
            categories_shown = shown[..., self.categorical]
            category_index = codes[..., self.categorical].where(categories_shown, 0) + self.first[self.categorical]
            x = x.index_add(-2, self.categorical, self.category[category_index] * categories_shown.unsqueeze(-1))
        return x

    def memories(self, rows: Rows, seen: list[Tensor] | None = None) -> list[Memory]:
        """Keys and values of the support set `rows`; see `DatapointEncoder.memories`."""
        with torch.no_grad():
            return self.encoder.memories(self.embed(rows), seen)

    def numbers(self, h: Float[Tensor, "*batch e"], column: int | None = None) -> Float[Tensor, "*batch"]:
        """Predicted standardised numbers of one column, or of all columns (batch, n, d, e)."""
        chosen = slice(None) if column is None else column
        return (h * self.number[chosen]).sum(-1) + self.number_bias[chosen]

    def logits(self, h: Float[Tensor, "*batch e"], column: int) -> Float[Tensor, "*batch categories"]:
        """Logits of a categorical column."""
        of_column = slice(sum(self.sizes[:column]), sum(self.sizes[: column + 1]))
        return h @ self.choice[of_column].mT + self.choice_bias[of_column]

    def target(self, h: Float[Tensor, "batch n d e"]) -> Float[Tensor, "batch n k"]:
        """Prediction of the last column: logits, or one number."""
        h, last = h[..., -1, :], len(self.sizes) - 1
        return self.logits(h, last) if self.sizes[last] else self.numbers(h, last).unsqueeze(-1)
