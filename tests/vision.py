"""Small models that see and read, of random weights, with their processors; nothing is fetched."""

from importlib import import_module

import numpy as np
import torch


class Late:
    """transformers, imported on use: tests that need none of it import this module, too."""

    def __getattr__(self, name):
        return getattr(import_module("transformers"), name)


transformers = Late()
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<image>"]
WORDS += ["a", "cat", "left", "of", "truck", "and", "the", "dog"]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
PIXELS = {"image_size": 32, "patch_size": 8}
READS = {**SMALL, "vocab_size": len(WORDS), "bos_token_id": 2, "eos_token_id": 3}
TEXT = "a cat left of the truck"


def tokenizer(image=False):
    plain = transformers.BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)})
    if not image:
        return plain
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    more = {"additional_special_tokens": ["<image>"]}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain.backend_tokenizer, **names, **more)


def randomised(model):
    """Weights large enough that heads differ, and biases that are not 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = 0.3 * torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + noise if "norm" in name.lower() and "weight" in name else noise)
    return model.eval()


def vilt(**changes):
    config = transformers.ViltConfig(**SMALL, **PIXELS, vocab_size=len(WORDS), **changes)
    return randomised(transformers.ViltModel(config))


def vilt_processor():
    images = transformers.ViltImageProcessorPil(size={"shortest_edge": 32}, size_divisor=8)
    return transformers.ViltProcessor(images, tokenizer())


def visual_bert():
    config = transformers.VisualBertConfig(**SMALL, vocab_size=len(WORDS), visual_embedding_dim=16)
    return randomised(transformers.VisualBertModel(config))


def llava():
    reads = transformers.LlamaConfig(**READS, num_key_value_heads=2)
    seen = transformers.CLIPVisionConfig(**SMALL, **PIXELS)
    config = transformers.LlavaConfig(text_config=reads, vision_config=seen, image_token_id=5)
    return randomised(transformers.LlavaModel(config))


def clip_images():
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


def llava_processor():
    facts = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return transformers.LlavaProcessor(clip_images(), tokenizer(image=True), image_token="<image>", **facts)


def vit(**changes):
    config = transformers.ViTConfig(**SMALL, **PIXELS, **changes)
    return randomised(transformers.ViTModel(config, add_pooling_layer=False))


def vit_processor():
    return transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})


def clip():
    config = transformers.CLIPConfig(text_config=READS, vision_config={**SMALL, **PIXELS}, projection_dim=16)
    return randomised(transformers.CLIPModel(config))


def clip_processor():
    return transformers.CLIPProcessor(clip_images(), tokenizer())


def saved(folder, model, processor):
    """A folder that a model and its processor are loaded from."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def photograph(mode="RGB", size=(64, 48)):
    """Something to see: a light square on a ground that darkens, in any mode of Pillow."""
    from PIL import Image

    wide, tall = size
    pixels = np.zeros((tall, wide, 3), np.uint8)
    pixels[..., 0] = np.linspace(40, 200, wide).astype(np.uint8)
    pixels[..., 2] = np.linspace(200, 40, tall).astype(np.uint8)[:, None]
    pixels[tall // 8 : tall // 3, wide // 2 : 3 * wide // 4] = 250
    return Image.fromarray(pixels).convert(mode)
