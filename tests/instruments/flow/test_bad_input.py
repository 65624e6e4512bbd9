"""What cannot be attention, labels, an image or a text is told in one sentence."""

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.proof.families import tiny_model
from tests import vision

EVEN = torch.full((4, 4), 0.25)
LABELS = ["a", "a", "b", "b"]
CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (["a", "b"], "modality has 2 labels, but the attention has 4 tokens"),
        (["a"] * 4, "modality must have at least two labels besides 'special', got only 'a'"),
        (["a", "a", "special", "a"], "at least two labels besides 'special', got only 'a', 'special'"),
        ([["a", "b"], ["a"]], "modality must be one row of labels, or one row per text"),
        ([LABELS, LABELS], "modality has 2 rows of labels, but the attention is of 1 texts"),
        (None, "modality is required with a tensor: one label per token"),
    ],
)
def test_labels_that_do_not_fit(labels, sentence):
    with pytest.raises(ValueError, match=sentence):
        kq.flow(EVEN, labels)


@pytest.mark.parametrize("labels", ["abcd", {"a": 1}, [], 7])
def test_labels_that_are_none(labels):
    with pytest.raises(TypeError, match="modality must be one label per token"):
        kq.flow(EVEN, labels)


def test_special_tokens_may_be_called_otherwise():
    reading = kq.flow(EVEN, ["a", "b", "b", "x"], special="x")
    assert reading.modalities == ["a", "b"]
    assert reading.raw == pytest.approx(4 / 9)
    assert kq.flow(EVEN, ["a", "b", "b", "x"], special="x", counted=True).raw == pytest.approx(1 - (1 + 4 + 1) / 16)


@pytest.mark.parametrize(
    ("attention", "sentence"),
    [
        (torch.full((4, 4), 0.5), "rows of attention must sum to 1, within 0.0001; row 0 of head 0 sums to 2"),
        (torch.zeros(4, 4), "rows of attention must sum to 1"),
        (-EVEN, "attention must not be negative, got -0.25 in row 0 of head 0"),
        (torch.full((4, 4), float("nan")), "attention must be finite"),
        (torch.full((2, 4), 0.25), r"attention must be \(..., n, n\), of tokens to the same tokens, got \(2, 4\)"),
        ([EVEN, torch.eye(3)], r"all layers of attention must have one shape, got \(4, 4\) and \(3, 3\)"),
    ],
)
def test_what_is_no_attention(attention, sentence):
    with pytest.raises(ValueError, match=sentence):
        kq.flow(attention, LABELS)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"mask": torch.ones(4, 4)}, TypeError, "mask must be bool, True where attention may go, got torch.float32"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, ValueError, r"mask must be \(4,\) or \(..., 4, 4\), got \(3,\)"),
        ({"mask": CAUSAL}, ValueError, "attention must be 0 where mask is False"),
        (
            {"mask": CAUSAL.expand(2, 4, 4)},
            ValueError,
            r"mask has leading dimensions \(2,\), but each layer of the attention \(\)",
        ),
        ({"values": torch.ones(3, 2)}, ValueError, r"values must have shape \(..., n, r\) with n = 4, got \(3, 2\)"),
        ({"output": torch.ones(3, 2)}, ValueError, "output needs values"),
        (
            {"values": torch.ones(4, 2), "output": torch.ones(3, 2)},
            ValueError,
            r"output must have shape \(..., r, d\) with r = 2, got \(3, 2\)",
        ),
        (
            {"values": torch.ones(2, 4, 3)},
            ValueError,
            r"values have leading dimensions \(2,\), but each layer of the attention \(\)",
        ),
        ({"tokens": ["a"]}, ValueError, "tokens must be a list of 4 strings, one per token"),
        ({"keep": -1}, ValueError, "keep must be at least 0, got -1"),
        ({"text": "some words"}, ValueError, "inputs, text, image and processor need a model"),
    ],
)
def test_bad_choices(options, error, sentence):
    with pytest.raises(error, match=sentence):
        kq.flow(EVEN, LABELS, **options)


def test_a_reading_that_is_none_is_told():
    reading = kq.flow(EVEN, LABELS)
    with pytest.raises(ValueError, match=r"reading must be one of 'raw', .* got 'row'; did you mean 'raw'"):
        reading.of("row")
    with pytest.raises(ValueError, match="reading must be one of 'raw', 'residual', 'net', 'rollout', got 'weighted'"):
        reading.directed_of("weighted")


def test_a_model_needs_something_to_run_on():
    model = vision.vilt()
    with pytest.raises(ValueError, match="a model needs either inputs, or text and image"):
        kq.flow(model)
    with pytest.raises(ValueError, match="values, output and mask are only for a tensor"):
        kq.flow(model, LABELS, inputs={}, mask=CAUSAL)
    with pytest.raises(TypeError, match="inputs must be a mapping of argument names to tensors, got Tensor"):
        kq.flow(model, inputs=torch.zeros(1, 4))
    with pytest.raises(ValueError, match="text and image need a processor"):
        kq.flow(model, text="a cat", image=vision.photograph())


def test_labels_that_do_not_match_what_a_model_attends_to():
    with pytest.raises(ValueError, match="modality has 4 labels, but BertModel attends to 6 tokens"):
        kq.flow(tiny_model("bert"), LABELS, inputs={"input_ids": torch.randint(3, 60, (1, 6))})
    with pytest.raises(ValueError, match="modality has 3 rows of labels, but the inputs hold 2 texts"):
        kq.flow(tiny_model("bert"), [LABELS] * 3, inputs={"input_ids": torch.randint(3, 60, (2, 4))})


def test_models_that_do_not_say_whose_tokens_are_whose():
    with pytest.raises(ValueError, match="BertModel: image tokens not found: pass modality"):
        kq.flow(tiny_model("bert"), inputs={"input_ids": torch.randint(3, 60, (1, 4))})
    with pytest.raises(ValueError, match="Encoder does not define the modality of its tokens: pass modality"):
        kq.flow(kq.Encoder(8, 1, 2), inputs={"x": torch.zeros(1, 4, 8)})


def test_two_towers_have_no_flow():
    model, processor = vision.clip(), vision.clip_processor()
    sentence = "CLIPModel has separate text and image towers without attention between them"
    with pytest.raises(ValueError, match=sentence):
        kq.flow(model, text=vision.TEXT, image=vision.photograph(), processor=processor)
    batch = dict(processor(images=vision.photograph(), text="a cat", return_tensors="pt"))
    with pytest.raises(ValueError, match=sentence):
        kq.flow(model, LABELS, inputs=batch)


def test_a_model_of_detected_things_takes_no_image():
    with pytest.raises(ValueError, match="VisualBERT takes detector features \\(visual_embeds\\), not an image"):
        kq.flow(vision.visual_bert(), text="a cat", image=vision.photograph(), processor=vision.vilt_processor())


def test_a_model_that_only_reads_takes_two_texts():
    model = tiny_model("bert", vocab_size=len(vision.WORDS))
    options = {"processor": vision.tokenizer()}
    with pytest.raises(ValueError, match="BertModel takes no image: it has no image processor; pass two texts"):
        kq.flow(model, text="a cat", image=vision.photograph(), **options)
    with pytest.raises(ValueError, match="pass a text and an image, or two texts, got 1"):
        kq.flow(model, text="a cat", **options)
    with pytest.raises(ValueError, match="an image needs exactly one text, got 2"):
        kq.flow(vision.vilt(), text=["a", "cat"], image=vision.photograph(), processor=vision.vilt_processor())


@pytest.mark.parametrize("text", ["", "  \n", ["a cat", ""]])
def test_texts_without_words(text):
    with pytest.raises(ValueError, match="text must contain words"):
        kq.flow(vision.vilt(), text=text, image=vision.photograph(), processor=vision.vilt_processor())


def test_a_text_that_is_too_long():
    with pytest.raises(ValueError, match="the text has 62 tokens, and ViltModel takes at most 40: use a shorter one"):
        kq.flow(vision.vilt(), text="cat " * 60, image=vision.photograph(), processor=vision.vilt_processor())


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK"])
def test_images_of_any_mode(mode, tmp_path):
    path = tmp_path / ("image.jpg" if mode == "CMYK" else "image.png")
    vision.photograph(mode).save(path)
    reading = kq.flow(vision.vilt(), text=vision.TEXT, image=path, processor=vision.vilt_processor())
    assert reading.counts["image"] == 20
    again = kq.flow(vision.vilt(), text=vision.TEXT, image=Image.open(path), processor=vision.vilt_processor())
    assert again.counts == reading.counts


@pytest.mark.parametrize("size", [(1, 1), (33, 31), (90, 40), (20, 37)])
def test_images_of_odd_sizes(size, tmp_path):
    path = tmp_path / "image.png"
    vision.photograph(size=size).save(path)
    for model, processor in ((vision.vilt(), vision.vilt_processor()), (vision.llava(), vision.llava_processor())):
        reading = kq.flow(model, text=vision.TEXT, image=path, processor=processor, keep=1)
        tall, wide = reading.picture["grid"]
        assert reading.counts["image"] == tall * wide > 0


@pytest.mark.parametrize("size", [(3, 64), (640, 8)])
def test_images_that_are_too_thin(size):
    options = {"text": vision.TEXT, "image": vision.photograph(size=size)}
    with pytest.raises(ValueError, match=f"ViltProcessor rejects an image of {size[0]} × {size[1]}: "):
        kq.flow(vision.vilt(), processor=vision.vilt_processor(), **options)
    assert kq.flow(vision.llava(), processor=vision.llava_processor(), **options).counts["image"] == 16


def test_files_that_are_no_images(tmp_path):
    (tmp_path / "text.png").write_text("no image")
    options = {"text": vision.TEXT, "processor": vision.vilt_processor()}
    with pytest.raises(ValueError, match=r"text.png is not an image that Pillow can decode"):
        kq.flow(vision.vilt(), image=tmp_path / "text.png", **options)
    with pytest.raises(FileNotFoundError, match="there is no image"):
        kq.flow(vision.vilt(), image=tmp_path / "none.png", **options)
    deep = Image.fromarray(np.zeros((8, 8), np.uint16))
    deep.save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match="must have 8 bits per channel, got mode I"):
        kq.flow(vision.vilt(), image=tmp_path / "deep.png", **options)


def test_a_dialled_model_is_not_measured_as_if_it_were_plain():
    model = tiny_model("llama")
    ids = {"input_ids": torch.randint(3, 60, (1, 4))}
    with (
        kq.dial(model, popularity=0.0, data=[ids], means="global"),
        pytest.raises(ValueError, match="the model is already dialled or projected: undo that first"),
    ):
        kq.flow(model, LABELS, inputs=ids)


def test_a_model_without_attention():
    with pytest.raises(ValueError, match="Linear ran without an attention call that torch shows"):
        kq.flow(torch.nn.Linear(2, 2), LABELS, inputs={"input": torch.zeros(1, 4, 2)})


class Widths(torch.nn.Module):
    """Layers with different numbers of heads."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([kq.Attention(8, 2), kq.Attention(8, 4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_with_different_numbers_of_heads():
    with pytest.raises(ValueError, match="Widths has layers of 2 and 4 heads: not supported"):
        kq.flow(Widths(), LABELS, inputs={"x": torch.randn(1, 4, 8)})


class Crossed(torch.nn.Module):
    """One sequence attends to another, and none to itself."""

    def __init__(self):
        super().__init__()
        self.cross = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, memory):
        return self.cross(x, memory, memory)[0]


def test_a_model_without_joint_attention():
    sentence = "Crossed returns no joint attention over all of its tokens: no sequence attends to itself"
    with pytest.raises(ValueError, match=sentence):
        kq.flow(Crossed(), LABELS, inputs={"x": torch.randn(1, 4, 8), "memory": torch.randn(1, 4, 8)})


@pytest.mark.parametrize("attentions", [None, (), (None, None)])
def test_maps_that_fused_attention_did_not_give_are_told(attentions):
    with pytest.raises(ValueError, match=r"attention contains no maps: .*attn_implementation='eager'"):
        kq.flow(attentions, ["image", "text"])


def test_the_name_of_a_file_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("a ship")
    arguments = ["flow", str(kq.models.ENCODER), "--text", str(tmp_path / "a.txt"), "--text", "b"]
    assert "--text takes the text itself" in str(CliRunner().invoke(cli.app, arguments).exception)
