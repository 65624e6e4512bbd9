"""Colours that mean the same everywhere: the parts of a score, and depth."""

from __future__ import annotations

# Far apart in hue and lightness, also for eyes that do not tell red from green; one tone for each background.
LIGHT = {
    "symmetric": "#2166ac",
    "skew": "#d6701c",
    "popularity": "#a8307f",
    "query_only": "#00875a",
    "position": "#858e98",
}
DARK = {
    "symmetric": "#62a8ea",
    "skew": "#f0953f",
    "popularity": "#ee8ccd",
    "query_only": "#2fd0a0",
    "position": "#7d8791",
}
# The corners of the triangle, in plain words.
PLAIN = {"symmetric": "similarity", "skew": "direction", "popularity": "key only"}
# Ablations of whole heads, beside those of parts.
WHOLE = {"zero": "head to 0", "mean": "head to mean"}
# Kernels in the tones of their parts: blues are symmetric, orange is skew, purple has both, grey is unstructured.
KERNELS = {
    "general": "#24292f",
    "pairwise": "#8c959f",
    "symmetric": "#2166ac",
    "psd": "#54aeff",
    "rbf": "#2a9d8f",
    "skew": "#d6701c",
    "split": "#8250df",
}
# Edges of causal graphs, in a tone for each background: what is known of them, from all to nothing.
EDGES = {"→": "#d6701c", "↔": "#8250df", "o→": "#2166ac", "o–o": "#6e7781", "–": "#1a7f37"}
EDGES_DARK = {"→": "#f0953f", "↔": "#b392f0", "o→": "#62a8ea", "o–o": "#9aa4af", "–": "#56d364"}
# Attention that is compared with softmax, whose grey is that of the general kernel.
ATTENTIONS = {"primal": "#2a9d8f", "primal+": "#8250df", "general": "#24292f", "eager": "#8c959f"}
# Classes of points, in a tone for each background; far apart also for eyes that do not tell red from green.
CLASSES = ("#2166ac", "#d6701c", "#2a9d8f", "#b03a8c", "#7a6a00", "#8250df", "#1a7f37", "#a40e26", "#4d5761", "#0e8fb8")
CLASSES_DARK = (
    "#62a8ea",
    "#f0953f",
    "#4fd1c1",
    "#e583c6",
    "#d9c84a",
    "#b392f0",
    "#56d364",
    "#ff8a80",
    "#b1bac4",
    "#5ccfee",
)
# Equal steps of lightness, light to dark, from the middle of viridis: visible on white and on black.
DEPTHS = ("#9bd93c", "#5ec962", "#2fb47c", "#1fa187", "#21918c", "#2a788e", "#355f8d", "#414487")


def depth_colour(share: float) -> str:
    """The colour of a depth between 0, the first layer, and 1, the last.

    >>> depth_colour(0), depth_colour(1)
    ('#9bd93c', '#414487')
    """
    at = min(max(share, 0.0), 1.0) * (len(DEPTHS) - 1)
    low = min(int(at), len(DEPTHS) - 2)
    one, other = (tuple(bytes.fromhex(DEPTHS[i][1:])) for i in (low, low + 1))
    return "#" + bytes(round(a + (b - a) * (at - low)) for a, b in zip(one, other, strict=True)).hex()


def tones() -> str:
    """Styles of a page: the colours of classes, by number, and of depth."""
    light, dark = (
        " ".join(f"--class{at}: {colour};" for at, colour in enumerate(tones)) for tones in (CLASSES, CLASSES_DARK)
    )
    shades = ", ".join(DEPTHS)
    return (
        f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f".depth {{ background: linear-gradient(to right, {shades}) }}\n"
    )
