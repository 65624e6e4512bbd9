"""A live model and inputs in; activations, queries and keys, their moments, and attention maps out."""

from keyquery.listening.hooks import Batch, activations, queries_and_keys, watch
from keyquery.listening.inputs.batches import text_batches, typical_length
from keyquery.listening.maps import attention_maps
from keyquery.listening.parts.moments import Moments, batches_of, joint_moments

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
