"""What tests of costs share: tiny models in float64, and runs in which outputs of heads are moved by hand."""

import torch
import transformers
from torch.nn.functional import cross_entropy

import keyquery as kq
from keyquery.checkpoints.family import families
from keyquery.instruments.ablation.changes import HeadCall
from keyquery.instruments.ablation.named import Made
from keyquery.intervene.dial.means import Means
from keyquery.intervene.rewrites import sites_of
from keyquery.proof.families import tiny_model
from tests.listening.models import full_precision

# llama: GQA; gpt2, opt: learned positions; gemma2: soft cap, windows; qwen3: QK-norm; falcon: parallel blocks, MQA;
# bloom: ALiBi; gpt_oss: sinks, without float64; t5: relative bias.
CAUSAL = ("llama", "gpt2", "gemma2", "gpt_neox", "qwen3", "falcon", "bloom", "opt", "phi", "gpt_oss")


def decoder(name, **changes):
    """A tiny causal model of an architecture, in float64 where it knows it."""
    base = families()[name].tiny["model"].removesuffix("Model")
    cls = next(f"{base}{head}" for head in ("ForCausalLM", "LMHeadModel") if hasattr(transformers, f"{base}{head}"))
    model = tiny_model(name, model=cls, **changes)
    return model if name == "gpt_oss" else model.double()


def text(rows=3, length=6, high=60, seed=0):
    """One batch of random tokens."""
    return {"input_ids": torch.randint(3, high, (rows, length), generator=torch.Generator().manual_seed(seed))}


def exact(monkeypatch):
    """Let models of float64 take their softmax and norms in it, not in float32."""
    full_precision(monkeypatch)
    single, to = torch.Tensor.float, torch.Tensor.to

    def kept(x, *args, **kwargs):
        return x if x.dtype == torch.float64 and args[:1] == (torch.float32,) else to(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", kept)
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else single(x))


def moves_of(model, batch, name, *several):
    """The change of the output of sets of heads (by site) in the run as it is: of (batch, heads, n, v) per call."""
    sites, moved = sites_of(model), {}
    about = Means(model, [batch], "global")
    made = Made(model, [batch], sites, {index: range(site.count) for index, site in sites.items()}, lambda: about)
    change = made.change(name)

    def record(call):
        index = next((index for index, site in sites.items() if site.module is call.module), None)
        if index is not None and not call.is_cross:
            heads = HeadCall(call, sites[index], range(call.heads), about.of(sites[index]))
            moved.setdefault(index, []).append(change.output(heads) - heads.output)

    with torch.no_grad(), kq.listen(model, record):
        model(**batch)
    sets = [
        {index: [_kept(move, cells[index]) for move in moved[index]] for index in cells if index in moved}
        for cells in several
    ]
    return sets if len(several) > 1 else sets[0]


def _kept(moved, heads):
    kept = torch.zeros_like(moved)
    kept[:, heads] = moved[:, heads]
    return kept


def logits_moved(model, batch, moves, step):
    """Logits when outputs of heads are moved by a multiple of `moves`; calls of one module have their own."""
    sites, number = sites_of(model), dict.fromkeys(moves, 0)

    def move(call):
        index = next((index for index, site in sites.items() if site.module is call.module), None)
        if index not in moves or call.is_cross:
            return None
        moved = moves[index][number[index]]
        number[index] += 1
        return {"output": (call.output() + step * moved).to(call.value.dtype)}

    with torch.no_grad(), kq.listen(model, move):
        out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out.logits


def losses_of_logits(logits, ids):
    """Mean next-token loss of every sequence."""
    return cross_entropy(logits[:, :-1].double().mT, ids[:, 1:], reduction="none").mean(1)


def slope(model, batch, moves, step=1e-3):
    """The derivative of the mean loss along a move of outputs, per sequence, by central differences of fourth order."""
    steps = (step, -step, 2 * step, -2 * step)
    losses = [losses_of_logits(logits_moved(model, batch, moves, size), batch["input_ids"]) for size in steps]
    return (8 * (losses[0] - losses[1]) - (losses[2] - losses[3])) / (12 * step)


def curvature(model, batch, moves, step=1e-5):
    """½ΔᵀJᵀFJΔ per label of every sequence: half the variance, under the model, of what a move adds to its logits."""
    up, down, here = (logits_moved(model, batch, moves, s)[:, :-1].double() for s in (step, -step, 0.0))
    added, share = (up - down) / (2 * step), here.softmax(-1)
    variance = (share * added.square()).sum(-1) - (share * added).sum(-1).square()
    return variance.sum(1) / 2 / variance.shape[1]
