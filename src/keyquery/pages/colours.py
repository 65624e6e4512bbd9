"""Colours, consistent across all displays: the parts of a score, depth, kernels and classes."""

from __future__ import annotations

# Distinct in hue and lightness, also for red-green colour blindness; one tone per background.
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
# Captions of the corners of the triangle.
PLAIN = {"symmetric": "similarity", "skew": "direction", "popularity": "key only"}
# Ablations of whole heads, as opposed to parts.
WHOLE = {"zero": "head to 0", "mean": "head to mean"}
# Kernels in the colours of their parts: blue is symmetric, orange is skew, purple has both, grey is unstructured.
KERNELS = {
    "general": "#24292f",
    "pairwise": "#8c959f",
    "symmetric": "#2166ac",
    "psd": "#54aeff",
    "rbf": "#2a9d8f",
    "skew": "#d6701c",
    "split": "#8250df",
}
# Edges of causal graphs by kind, in one tone per background.
EDGES = {"→": "#d6701c", "↔": "#8250df", "o→": "#2166ac", "o–o": "#6e7781", "–": "#1a7f37"}
EDGES_DARK = {"→": "#f0953f", "↔": "#b392f0", "o→": "#62a8ea", "o–o": "#9aa4af", "–": "#56d364"}
# Attention variants compared with softmax, which has the grey of the general kernel.
ATTENTIONS = {"primal": "#2a9d8f", "primal+": "#8250df", "general": "#24292f", "eager": "#8c959f"}
# Classes of points, in one tone per background; distinct also for red-green colour blindness.
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
# Evidence for and against a prediction.
FOR, AGAINST = "#2a9d8f", "#b3446c"
# Roles of heads: sinks, where heads rest, in the grey of positions.
ROLES = {
    "induction": CLASSES[0],
    "duplicate_token": CLASSES[1],
    "retrieval": CLASSES[2],
    "previous_token": CLASSES[3],
    "next_token": CLASSES[5],
    "alignment": CLASSES[7],
    "local": CLASSES[4],
    "sink": LIGHT["position"],
}
ROLES_DARK = {
    **{role: CLASSES_DARK[CLASSES.index(tone)] for role, tone in ROLES.items() if tone in CLASSES},
    "sink": DARK["position"],
}
# Equal steps of lightness, light to dark, from the middle of viridis; visible on white and on black.
DEPTHS = ("#9bd93c", "#5ec962", "#2fb47c", "#1fa187", "#21918c", "#2a788e", "#355f8d", "#414487")


def depth_colour(share: float) -> str:
    """The colour of a relative depth from 0 (first layer) to 1 (last layer)."""
    at = min(max(share, 0.0), 1.0) * (len(DEPTHS) - 1)
    low = min(int(at), len(DEPTHS) - 2)
    lower, upper = (tuple(bytes.fromhex(DEPTHS[i][1:])) for i in (low, low + 1))
    return "#" + bytes(round(a + (b - a) * (at - low)) for a, b in zip(lower, upper, strict=True)).hex()


def tones() -> str:
    """CSS with the colours of classes, by number, and of roles."""
    light = {f"class{number}": colour for number, colour in enumerate(CLASSES)}
    dark = {f"class{number}": colour for number, colour in enumerate(CLASSES_DARK)}
    light |= {f"role-{role}": colour for role, colour in ROLES.items()}
    dark |= {f"role-{role}": colour for role, colour in ROLES_DARK.items()}
    one, other = (" ".join(f"--{name}: {colour};" for name, colour in of.items()) for of in (light, dark))
    return f":root {{ {one} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {other} }} }}\n"
