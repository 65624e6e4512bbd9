"""Training of a VisualParser: masked words, mismatched texts and masked patches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, layer_norm

from keyquery.learn.fitting import epochs_of, fit_network
from keyquery.learn.inputs.captions import FIRST, MASK
from keyquery.learn.training import Recipe
from keyquery.learn.vision_language.network import Seen, VisionLanguageNetwork
from keyquery.support.progress import Progress

MASKED = 0.15  # share of words, and of patches
HARD = 0.5  # share of hard negatives: the most similar text of a pool
POOL = 128  # texts per pool


class Pairs(NamedTuple):
    """Images, or their features by a frozen patch encoder, and the word ids of their texts."""

    images: UInt8[Tensor, "n 3 size size"] | Seen
    ids: Int[Tensor, "n longest"]

    def seen(self, network: VisionLanguageNetwork, index: Any) -> Seen:
        """Patch features of some images, and the attention between them."""
        if isinstance(self.images, Seen):
            return self.images.take(index)
        return network.see(self.images[index], attention=True)


class Batch(NamedTuple):
    """A batch of pairs with all random draws."""

    rows: Int[Tensor, " batch"]  # indices of the pairs
    ids: Int[Tensor, "batch n"]
    hidden_words: Bool[Tensor, "batch n"]
    other: Int[Tensor, "batch n"]  # the negative text
    usable: Bool[Tensor, " batch"]  # whether there is a negative
    dice: Float[Tensor, "batch tokens"]  # the largest is the seed; the largest ones are a random mask


def hide_words(ids: Int[Tensor, "batch n"], share: float, generator: torch.Generator) -> Bool[Tensor, "batch n"]:
    """Masks a share of the known words, at least one per text."""
    dice = torch.rand(ids.shape, generator=generator).masked_fill(ids < FIRST, 2.0)
    return (ids >= FIRST) & ((dice < share) | (dice == dice.amin(1, keepdim=True)))


def others(
    ids: Int[Tensor, "batch n"], pool: Int[Tensor, "texts n"], words: int, generator: torch.Generator
) -> tuple[Int[Tensor, " batch"], Bool[Tensor, " batch"]]:
    """A negative for each text from a pool, and whether there is one: half random, half the most similar.

    Similar texts share many words, such as the same words in another order; identical texts are not negatives.
    """
    unlike = (ids.unsqueeze(1) != pool.unsqueeze(0)).any(-1)
    mine, its = (torch.zeros(len(rows), words).scatter_add(1, rows, (rows >= FIRST).float()) for rows in (ids, pool))
    common = torch.minimum(mine.unsqueeze(1), its.unsqueeze(0)).sum(-1)
    dice = torch.rand(unlike.shape, generator=generator)  # below 1: breaks ties
    near = torch.rand(len(ids), 1, generator=generator) < HARD
    return (dice + common * near).masked_fill(~unlike, -1.0).argmax(1), unlike.any(1)


def losses(network: Any, pairs: Pairs, batch: Batch, count: int) -> dict[str, Float[Tensor, ""]]:
    """Losses of masked words, of matching, and of `count` masked patches, in nats and squared units.

    A pair passes through the joint encoder unmasked, with a negative text, with masked words, and with masked patches.
    Regression targets are normalised features without gradients.
    """
    seen = pairs.seen(network, batch.rows)
    features, words, n = seen.features, batch.ids, len(batch.rows)
    texts = [words, batch.other, words.masked_fill(batch.hidden_words, MASK), words]
    shown = torch.zeros(n, features.shape[1], dtype=torch.bool, device=words.device)
    hidden = [shown, shown, shown, _patches(seen, batch.dice, count)]
    out = network(features.repeat(len(texts), 1, 1), torch.cat(texts), torch.cat(hidden)).split(n)
    logits = torch.cat((network.match(out[0]), network.match(out[1])[batch.usable]))
    truth = torch.zeros_like(logits)
    truth[:n] = 1
    target = layer_norm(features.detach().float(), features.shape[-1:])
    return {
        "words": cross_entropy(network.spell(out[2])[batch.hidden_words], words[batch.hidden_words]),
        "match": binary_cross_entropy_with_logits(logits, truth),
        "features": (network.regress(out[3])[hidden[3]] - target[hidden[3]]).square().mean(),
    }


def _patches(seen: Seen, dice: Tensor, count: int) -> Bool[Tensor, "batch tokens"]:
    """Patches to mask: the seed, and those that it attends to most; random ones without attention.

    Features of neighbouring patches overlap: a patch that is masked alone could be copied from them.
    """
    rows = dice
    if seen.attention is not None:
        seeds = dice.argmax(1, keepdim=True)
        rows = seen.attention[torch.arange(len(dice), device=dice.device), seeds[:, 0]].scatter(1, seeds, torch.inf)
    return torch.zeros_like(rows, dtype=torch.bool).scatter(1, rows.topk(count, dim=1).indices, True)


def learn(
    network: VisionLanguageNetwork,
    pairs: Pairs,
    *,
    size: int,
    epochs: int,
    lr: float,
    seed: int,
    progress: Progress,
    verbose: bool,
) -> list[dict[str, float]]:
    """Train in place, and return the history, one row per epoch."""
    words, device, tokens = len(network.table()), pairs.ids.device, network.vision.tokens
    which, every = epochs_of(lambda index: index, len(pairs.ids), size, seed)
    count, texts = max(round(MASKED * tokens), 1), pairs.ids.cpu()
    steps: list[dict[str, Tensor]] = []

    def draw(step: int, generator: torch.Generator) -> Batch:
        index = torch.from_numpy(which(step, generator))
        ids = texts[index]
        pool = texts[torch.randint(len(texts), (POOL,), generator=generator)]
        other, usable = others(ids, pool, words, generator)
        dice = torch.rand(len(index), tokens, generator=generator)
        drawn = (index, ids, hide_words(ids, MASKED, generator), pool[other], usable, dice)
        return Batch(*(part.to(device) for part in drawn))

    def loss(model: Any, batch: Batch) -> Tensor:
        parts = losses(model, pairs, batch, count)
        steps.append({name: part.detach() for name, part in parts.items()})
        return torch.stack(list(parts.values())).sum()

    recipe = Recipe(epochs * every, lr=lr, warmup=min(2 * every, epochs * every // 10), seed=seed, check_every=every)
    log = fit_network(network, draw, loss, recipe, progress=progress, verbose=verbose)
    history = []
    for number, row in enumerate(log.rows):
        epoch = steps[number * every : (number + 1) * every]
        means = {name: float(torch.stack([terms[name] for terms in epoch]).mean()) for name in epoch[0]}
        history.append({"epoch": number + 1, "loss": row["loss"], **means})
    return history


@torch.no_grad()
def watched(network: VisionLanguageNetwork, images: UInt8[Tensor, "n 3 size size"], progress: Progress) -> Seen:
    """Features of all images by a frozen patch encoder, stored in half precision."""
    network.eval()
    chunks = images.split(64)
    outputs = [network.see(chunk, attention=True) for chunk in progress(chunks, "features of images", len(chunks))]
    maps = [output.attention for output in outputs if output.attention is not None]
    return Seen(torch.cat([output.features.half() for output in outputs]), torch.cat(maps).half() if maps else None)
