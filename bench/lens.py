"""What TransformerLens does for the same question: load GPT-2 small, take the QK circuits' eigenvalues and SVD.

Run by look.py with the python of an environment that has transformer-lens 4.3 in it. It has no symmetric and skew
parts, so it does less than we do.
"""

import sys

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformer_lens.model_bridge import TransformerBridge
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

model = GPT2LMHeadModel.from_pretrained(sys.argv[1])
words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), eos_token="a")
lens = TransformerBridge.boot_transformers("gpt2", hf_model=model, tokenizer=words)
with torch.no_grad():
    circuit = lens.QK
    eigenvalues, (_, singular, _) = circuit.eigenvalues, circuit.svd()
assert eigenvalues.shape[:2] == singular.shape[:2] == (12, 12)
