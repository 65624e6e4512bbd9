"""A live model and inputs in; activations, queries and keys, their moments, and attention maps out."""

from keyquery.capture.batches import text_batches, typical_length
from keyquery.capture.hooks import Batch, activations, queries_and_keys, watch
from keyquery.capture.moments import Moments, batches_of, joint_moments
from keyquery.capture.whole_maps import attention_maps

__all__ = [
    "Batch",
    "Moments",
    "activations",
    "attention_maps",
    "batches_of",
    "joint_moments",
    "queries_and_keys",
    "text_batches",
    "typical_length",
    "watch",
]
