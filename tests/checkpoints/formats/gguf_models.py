"""Tiny models of transformers, written as GGUF files by the rules of llama.cpp's converters, and their own scores."""

from contextlib import ExitStack

import gguf
import torch

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 60,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
}
PREFIXES = ("", "model.", "transformer.", "gpt_neox.", "model.language_model.")
SPY = "keyquery_gguf_spy"


def tiny(cls, **changes):
    """A model with random weights, also biases and gains."""
    import transformers

    kind = getattr(transformers, cls)
    torch.manual_seed(0)
    config = kind.config_class(**{**SIZES, **changes}, attn_implementation="eager")
    model = kind(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.3 * torch.randn_like(parameter)
            norm = ("norm" in name.lower() or "ln_" in name) and "weight" in name
            parameter.copy_(1 + noise if norm else noise)
    return model


def pairs(weight, heads):
    """Pairs (i, i + r/2) become neighbours."""
    rank = len(weight) // heads
    return weight.reshape(heads, 2, rank // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def in_blocks(weight, groups, shared, rank):
    """Queries, keys and values of each group become all queries, all keys, all values."""
    parts = weight.reshape(groups, shared + 2, rank, *weight.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in (parts[:, :-2], parts[:, -2:-1], parts[:, -1:])])


def tensors_of(model, architecture, **rules):
    """Tensors under GGUF's names, changed as the converter of the architecture does."""
    config = model.config
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    groups = rules.get("groups") or groups or heads
    rank = getattr(config, "head_dim", None) or config.hidden_size // heads
    number = next(a for a, called in gguf.MODEL_ARCH_NAMES.items() if called == architecture)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found = {}
    for name, value in model.state_dict().items():
        tried = (table.get_name(prefix + name, try_suffixes=(".weight", ".bias")) for prefix in PREFIXES)
        called = next((one for one in tried if one), None)
        if called is None or not any(part in called for part in ("attn", "norm", "token_embd")):
            continue
        if rules.get("permute") and (".attn_q." in called or ".attn_k." in called):
            value = pairs(value, heads if ".attn_q." in called else groups)
        if rules.get("one") and called.endswith("norm.weight"):
            value = value + 1
        if rules.get("transpose") and called.endswith("attn_qkv.weight"):
            value = value.T
        if rules.get("regroup") and ".attn_qkv." in called:
            value = in_blocks(value, groups, heads // groups, rank)
        if called.endswith("attn_kv_b.weight"):
            nope, latent = config.qk_nope_head_dim, config.kv_lora_rank
            up = value.reshape(heads, -1, latent)[:, :nope]
            called, value = called.replace("attn_kv_b", "attn_k_b"), up.transpose(1, 2)
        found[called] = value.contiguous()
    if rules.get("fuse"):  # as NomicBERT's own files have them
        for layer in range(config.num_hidden_layers):
            own = [model.state_dict()[f"layers.{layer}.self_attn.{role}_proj.weight"] for role in "qkv"]
            found = {name: value for name, value in found.items() if not name.startswith(f"blk.{layer}.attn_")}
            found[f"blk.{layer}.attn_qkv.weight"] = torch.cat(own)
            for end in ("weight", "bias"):
                norm = model.state_dict()[f"layers.{layer}.post_mlp_layernorm.{end}"]
                found[f"blk.{layer}.layer_output_norm.{end}"] = norm
    return found


def write(path, architecture, tensors, config, theta=None, kind=None, **fields):
    """A GGUF file with the metadata that converters write."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(getattr(config, "max_position_embeddings", 128))
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if theta is not None:
        writer.add_rope_freq_base(theta)
    for key, value in fields.items():
        getattr(writer, key)(*value) if isinstance(value, tuple) else getattr(writer, key)(value)
    for name, value in tensors.items():
        values = value.float().numpy()
        packed = kind is not None and name.endswith("weight") and values.ndim == 2 and "norm" not in name
        writer.add_tensor(
            name, gguf.quants.quantize(values, kind) if packed else values, raw_dtype=kind if packed else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def own_scores(model, length=9):
    """The model's scaled q·k by layer, with the tokens that entered, and those that entered the block; masks apart."""
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.modeling_utils import AttentionInterface

    names = {module: label for label, module in model.named_modules()}
    scores, seen = {}, {}

    def spy(module, query, key, value, mask, scaling=None, **rest):
        shared = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(shared, dim=1) for t in (key, value))
        own = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        scores.setdefault(names[module], own[0])
        own = own if mask is None else own + mask[..., : key.shape[-2]]
        return (own.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    def record(label):
        def hook(module, args, kwargs):
            entered = args[0] if args else kwargs.get("hidden_states")
            if isinstance(entered, torch.Tensor):
                seen.setdefault(label, entered[0])

        return hook

    AttentionInterface.register(SPY, spy)
    AttentionMaskInterface.register(SPY, eager_mask)
    model.set_attn_implementation(SPY)
    with ExitStack() as stack, torch.no_grad():
        for label, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(record(label), with_kwargs=True).remove)
        model(input_ids=torch.randint(3, 50, (1, length)))
    return [(own, seen[label], seen.get(label.rpartition(".")[0])) for label, own in scores.items()]


def own_maps(model, attention, length=9):
    """Attention maps and entered tokens of models that do not use transformers' interface."""
    seen = {}
    labels = [label for label, _ in model.named_modules() if label.endswith(attention)]
    with ExitStack() as stack, torch.no_grad():
        for label in labels:

            def hook(module, args, kwargs, label=label):
                seen[label] = (args[0] if args else kwargs["hidden_states"])[0]

            handle = model.get_submodule(label).register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        out = model(input_ids=torch.randint(3, 50, (1, length)), output_attentions=True)
    return [(own[0], seen[label]) for own, label in zip(out.attentions, labels, strict=True)]


def read_scores(layers, x):
    """Scaled q·k of a layer as it was read: of MLA's two kernels, the sum."""
    total = 0
    for layer in layers:
        query, key = layer.project(x)
        if layer.rope is not None:
            query, key = (layer.rope.rotate(t, torch.arange(len(x))) for t in (query, key))
        total = total + layer.scale * (query @ key.mT).flatten(0, 1)
    return total
