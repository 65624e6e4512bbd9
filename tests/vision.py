"""Small models that see and read, of random weights, with their processors; nothing is fetched."""

import numpy as np
import torch

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<image>"]
WORDS += ["a", "cat", "left", "of", "truck", "and", "the", "dog"]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = "a cat left of the truck"


def tokenizer(image=False):
    from transformers import BertTokenizer, PreTrainedTokenizerFast

    plain = BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)})
    if not image:
        return plain
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    more = {"additional_special_tokens": ["<image>"]}
    return PreTrainedTokenizerFast(tokenizer_object=plain.backend_tokenizer, **names, **more)


def randomised(model):
    """Weights large enough that heads differ, and biases that are not 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = 0.3 * torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + noise if "norm" in name.lower() and "weight" in name else noise)
    return model.eval()


def vilt(**changes):
    from transformers import ViltConfig, ViltModel

    return randomised(ViltModel(ViltConfig(**SMALL, vocab_size=len(WORDS), image_size=32, patch_size=8, **changes)))


def vilt_processor():
    from transformers import ViltProcessor
    from transformers.models.vilt.image_processing_pil_vilt import ViltImageProcessorPil

    return ViltProcessor(ViltImageProcessorPil(size={"shortest_edge": 32}, size_divisor=8), tokenizer())


def visual_bert():
    from transformers import VisualBertConfig, VisualBertModel

    return randomised(VisualBertModel(VisualBertConfig(**SMALL, vocab_size=len(WORDS), visual_embedding_dim=16)))


def llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaModel

    words = {"vocab_size": len(WORDS), "num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 3}
    seen = CLIPVisionConfig(**SMALL, image_size=32, patch_size=8)
    config = LlavaConfig(text_config=LlamaConfig(**SMALL, **words), vision_config=seen, image_token_id=5)
    return randomised(LlavaModel(config))


def llava_processor():
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    facts = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(image_processor=images, tokenizer=tokenizer(image=True), image_token="<image>", **facts)


def vit(**changes):
    from transformers import ViTConfig, ViTModel

    return randomised(ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8, **changes), add_pooling_layer=False))


def vit_processor():
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    return ViTImageProcessorPil(size={"height": 32, "width": 32})


def clip():
    from transformers import CLIPConfig, CLIPModel

    words = {**SMALL, "vocab_size": len(WORDS), "bos_token_id": 2, "eos_token_id": 3}
    seen = {**SMALL, "image_size": 32, "patch_size": 8}
    return randomised(CLIPModel(CLIPConfig(text_config=words, vision_config=seen, projection_dim=16)))


def clip_processor():
    from transformers import CLIPProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return CLIPProcessor(images, tokenizer())


def saved(folder, model, processor):
    """A folder that a model and its processor are loaded from."""
    import transformers

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
