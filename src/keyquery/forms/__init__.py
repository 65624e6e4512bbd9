"""The algebra of bilinear forms: tensors in, tensors out."""

from keyquery.forms.coupling import monge_gap
from keyquery.forms.directions import Eigh, Planes, Svd
from keyquery.forms.form import Form, Shares
from keyquery.forms.ksvd import Ksvd, ksvd, nystrom
from keyquery.forms.measures import Signature
from keyquery.forms.rope import Rope

__all__ = ["Eigh", "Form", "Ksvd", "Planes", "Rope", "Shares", "Signature", "Svd", "ksvd", "monge_gap", "nystrom"]
