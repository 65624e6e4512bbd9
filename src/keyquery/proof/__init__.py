"""The proof of a reading: the scores of a tiny random model against those that its checkpoint is read to have."""

from keyquery.proof.proof import Proof, prove

__all__ = ["Proof", "prove"]
