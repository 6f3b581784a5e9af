"""check_data is silent on sets that are as they should be, however odd they look."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

import nbdebug
from tests.media import captioned, numbers, picture, pictures, sound, sounds

SETS: dict[str, tuple[object, dict[str, object]]] = {}


def healthy(make=None, **expected):
    """Declare a set: make(folder) gives a set in memory, or None for what is in the folder."""

    def declared(make):
        SETS[make.__name__] = make, expected
        return make

    return declared(make) if make else declared


def saved(folder: pathlib.Path, images, names="p{}.png") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        image.save(folder / names.format(number))


def caption_all(folder: pathlib.Path, text, count: int = 12) -> None:
    for number, path in enumerate(captioned(folder, count)):
        path.write_text(text(number) if callable(text) else text, encoding="utf-8")


# -- captions ----------------------------------------------------------------------------------------------------------


@healthy(caption_extension=".txt")
def captions_that_name_the_class(folder):
    caption_all(folder, "tabby cat")


@healthy(caption_extension=".txt")
def captions_of_three_classes(folder):
    caption_all(folder, lambda n: f"a photo of a {('dog', 'cat', 'horse')[n % 3]} outside")


@healthy(caption_extension=".txt")
def captions_of_two_classes_one_of_them_rare(folder):
    caption_all(folder, lambda n: f"a photo of a {'dog' if n < 38 else 'cat'} outside", 40)


@healthy(caption_extension=".txt", trigger="zwx")
def one_prompt_of_dreambooth(folder):
    caption_all(folder, "a photo of zwx dog")


@healthy(caption_extension=".txt", min_words=3)
def captions_in_chinese(folder):
    caption_all(folder, lambda n: "\u4e00\u4e2a\u8336\u58f6" + chr(0x4E00 + n))


@healthy
def captions_alike_in_half_of_the_set(folder):
    caption_all(folder, lambda n: "a teapot stands on a table" if n % 2 else f"teapot and {n} cups on a tray")


# -- pictures beside pictures ------------------------------------------------------------------------------------------


@healthy
def frames_of_a_video(folder):
    x, y = np.meshgrid(np.arange(64), np.arange(64))
    scene = np.asarray(picture(3, (64, 64)), "float64")
    frames = []
    for t in range(40):
        frame = scene.copy()
        frame[np.hypot(x - 10 - t, y - 30) < 9] = (250, 40, 40)
        frames.append(Image.fromarray((np.roll(frame, t // 2, 1)).astype("uint8")))
    saved(folder, frames, "frame{:03}.png")


@healthy
def frames_of_a_camera_that_stands(folder):
    rng, scene = np.random.default_rng(0), np.asarray(picture(3, (64, 64)), "float64")
    noisy = ((scene + rng.normal(0, 3, scene.shape)).clip(0, 255).astype("uint8") for _ in range(30))
    saved(folder, map(Image.fromarray, noisy))


def face(seed: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    image = Image.new("L", (64, 64), int(rng.integers(150, 230)))
    draw = ImageDraw.Draw(image)
    cx, cy, w, h = 32 + rng.integers(-2, 3), 33 + rng.integers(-2, 3), rng.integers(17, 22), rng.integers(22, 27)
    draw.ellipse((cx - w, cy - h, cx + w, cy + h), fill=int(rng.integers(90, 140)))
    for side in (-1, 1):
        ex, ey, r = cx + side * rng.integers(6, 10), cy - rng.integers(4, 9), rng.integers(2, 5)
        draw.ellipse((ex - r, ey - r, ex + r, ey + r), fill=int(rng.integers(0, 50)))
    draw.line((cx - rng.integers(4, 9), cy + 12, cx + rng.integers(4, 9), cy + rng.integers(10, 15)), fill=20, width=2)
    return image


@healthy
def faces_in_one_frame(folder):
    saved(folder, map(face, range(80)))


def digit(seed: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    image = Image.new("L", (28, 28))
    ImageDraw.Draw(image).text(rng.integers(6, 12, 2).tolist(), str(seed % 10), 255, ImageFont.load_default())
    return image.rotate(int(rng.integers(-12, 12)), Image.BICUBIC)


@healthy
def digits_in_one_font(folder):
    saved(folder, map(digit, range(200)))


@healthy
def pages_of_a_book(folder):
    rng, pages = np.random.default_rng(0), []
    for _ in range(30):
        page = Image.new("L", (120, 160), 255)
        for line in range(10, 150, 7):
            ImageDraw.Draw(page).line((12, line, 12 + int(rng.integers(70, 96)), line), fill=30, width=3)
        pages.append(page)
    saved(folder, pages)


@healthy
def a_rare_class_drawn_five_times(folder):
    pictures(folder / "common", 30)
    saved(folder / "rare", [picture(500 + n % 4) for n in range(20)])


@healthy
def two_scales_of_each_picture(folder):
    pictures(folder / "hr", 24)
    saved(folder / "lr", (picture(n).resize((20, 20)) for n in range(24)))


@healthy
def augmented_beside_its_source(folder):
    pictures(folder, 24)
    saved(folder, (picture(n).transpose(Image.FLIP_LEFT_RIGHT) for n in range(24)), "p{}_flip.png")


@healthy
def flat_colours(folder):
    saved(folder, (Image.new("RGB", (32, 32), (8 * n, 100, 200 - n)) for n in range(24)))


# -- pictures ----------------------------------------------------------------------------------------------------------


@healthy
def greyscale_throughout(folder):
    saved(folder, (picture(n, mode="L") for n in range(12)))


@healthy(mode="I;16")
def sixteen_bits(folder):
    saved(folder, (Image.fromarray(np.asarray(picture(n, mode="L")).astype("uint16") * 257) for n in range(12)))


@healthy(mode="RGBA")
def alpha_where_meant(folder):
    saved(folder, (picture(n, mode="RGBA") for n in range(12)))


@healthy
def sizes_of_a_collection(folder):
    saved(folder, (picture(n, (40 + 7 * n, 60 + 5 * (n % 4))) for n in range(12)))


@healthy
def class_folders_of_one_large_class(folder):
    pictures(folder / "cats", 40)
    pictures(folder / "dogs", 4, 100)


@healthy(masks="masks", num_classes=3)
def masks_of_three_classes(folder):
    pictures(folder / "images", 12)
    rng = np.random.default_rng(0)
    saved(folder / "masks", (Image.fromarray(rng.integers(0, 3, (40, 40), dtype="uint8")) for _ in range(12)))


@healthy
def three_splits(folder):
    for split, seed in (("train", 0), ("val", 50), ("test", 80)):
        pictures(folder / split, 12, seed)


# -- sounds, tables, rows ----------------------------------------------------------------------------------------------


@healthy
def stereo_throughout(folder):
    for number in range(6):
        sound(folder / f"s{number}.wav", 7000 + 200 * number, channels=2)


@healthy
def soft_and_loud_sounds(folder):
    sounds(folder)
    sound(folder / "soft.wav", 60)


@healthy
def rows_that_are_meant_to_repeat(folder):
    return pd.concat([numbers(), numbers().head(20)], ignore_index=True)


@healthy
def a_table_with_a_long_tail(folder):
    table = numbers()
    table["a"] = np.exp(np.random.default_rng(0).normal(0, 3, len(table)))
    table.to_csv(folder / "t.csv", index=False)


@healthy
def a_table_with_a_rare_class(folder):
    table = numbers(200)
    table["label"] = (np.arange(200) % 40 == 0).astype(int)
    table.to_csv(folder / "t.csv", index=False)


@healthy
def records_of_texts(folder):
    lines = [json.dumps({"text": f"sentence number {n} of the set", "label": n % 2}) for n in range(30)]
    (folder / "t.jsonl").write_text("\n".join(lines), encoding="utf-8")


@healthy(vocab_size=100, pad_id=0, eos_id=2, max_length=12)
def tokens_that_are_padded(folder):
    return [{"input_ids": [5 + n % 7, 9 + n, 2] + [0] * (9 - n % 3)} for n in range(20)]


@healthy
def tensors_with_labels(folder):
    torch.manual_seed(0)
    return torch.utils.data.TensorDataset(torch.randn(40, 3, 8, 8), torch.arange(40) % 4)


WORDS = "the a plot actor music scene slow bright long dull funny score end".split()


def reviews(count: int = 60, words: int = 14) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, words)) for _ in range(count)]


@healthy
def texts_of_a_rare_class_drawn_five_times(folder):
    texts = reviews()
    return pd.DataFrame({"text": [*texts, *texts[:3] * 4], "label": [1] * 3 + [0] * 57 + [1] * 12})


@healthy
def answers_of_a_word_or_two(folder):
    return [{"text": ("yes", "no", "not at all")[n % 3], "label": n % 3} for n in range(90)]


@healthy
def three_opinions_on_each_text(folder):
    frame = pd.DataFrame({"text": reviews(30) * 3, "annotator": np.repeat([0, 1, 2], 30)})
    frame.to_csv(folder / "t.csv", index=False)


@healthy
def a_question_on_each_line_of_one_text(folder):
    lines = [{"context": reviews(1)[0], "question": text} for text in reviews(30, 5)]
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))


def encoded(text: str) -> list[int]:
    return [WORDS.index(word) + 2 if word in WORDS else 1 for word in text.split()]


@healthy(tokenizer=encoded, unk_id=1)
def texts_with_a_name_now_and_then(folder):
    return [{"text": text + " Zbigniew" * (n % 3 == 0)} for n, text in enumerate(reviews())]


class Bytes:
    """As GPT-2's: there is no unknown token, and the end of a text stands in its place."""

    eos_token_id = bos_token_id = unk_token_id = 50256
    model_max_length = None

    def __len__(self) -> int:
        return 50257

    def convert_ids_to_tokens(self, ids):
        return ids

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [50256, *text.encode()]}


@healthy
def rows_that_are_ends_to_a_byte_level_tokenizer(folder):
    return [{"input_ids": [50256] * 12 + [n]} for n in range(40)]


@healthy(num_classes=8)
def tensors_of_a_long_tail(folder):
    labels = torch.repeat_interleave(torch.arange(7), torch.tensor([90, 40, 20, 10, 5, 2, 1]))
    return torch.utils.data.TensorDataset(torch.randn(len(labels), 4), labels)


@pytest.mark.parametrize("name", SETS)
def test_a_healthy_set_is_met_with_silence(name: str, tmp_path: pathlib.Path) -> None:
    make, expected = SETS[name]
    made = make(tmp_path)
    expected = Bytes() if "byte_level" in name else expected
    report = nbdebug.check_data(tmp_path if made is None else made, expected=expected, progress=False)
    assert report.ok and report.facts["looked at"], [(f.code, f.title) for f in report]


def test_copies_within_a_split_are_told_beside_those_across(tmp_path: pathlib.Path) -> None:
    pictures(tmp_path / "train", 30)
    pictures(tmp_path / "val", 24, 100)
    picture(3).save(tmp_path / "train" / "again.jpg", quality=60)
    picture(3).save(tmp_path / "val" / "p7.png")
    picture(101).transpose(Image.FLIP_TOP_BOTTOM).save(tmp_path / "val" / "p9.png")
    found = nbdebug.check_data(tmp_path, progress=False).facts["items"]
    across, within = "data/duplicate-across-splits", "data/duplicate-within-split"
    assert found == {"val/p7.png": across, "val/p9.png": within, "train/p3.png": within}, found


def test_a_cure_does_not_leave_all_out(tmp_path: pathlib.Path) -> None:
    caption_all(tmp_path, "a teapot stands on a table")
    (finding,) = nbdebug.check_data(tmp_path, expected={"caption_extension": ".txt"}, progress=False)
    assert [(fix.title, fix.verified) for fix in finding.fixes] == [
        ("Give one prompt to the trainer, and no captions.", True)
    ]


def test_a_strip_among_photographs_is_named(tmp_path: pathlib.Path) -> None:
    saved(tmp_path, (picture(n, (40 + 7 * n, 60 + 5 * n)) for n in range(12)))
    picture(20, (1200, 40)).save(tmp_path / "strip.png")
    assert nbdebug.check_data(tmp_path, progress=False).facts["items"] == {"strip.png": "data/wrong-image-size"}


def test_lengths_that_are_far_apart_are_a_remark(tmp_path: pathlib.Path) -> None:
    sounds(tmp_path)
    sound(tmp_path / "long.wav", rate=96_000)  # 24,000 frames
    data = bytearray((tmp_path / "long.wav").read_bytes())
    data[24:28], data[28:32] = (8000).to_bytes(4, "little"), (16_000).to_bytes(4, "little")
    (tmp_path / "long.wav").write_bytes(data)
    report = nbdebug.check_data(tmp_path, progress=False)
    assert report.ok and report.notes == ("The sounds last from 0.25 s to 3 s.",)


def test_the_balance_of_labels_is_a_remark(tmp_path: pathlib.Path) -> None:
    report = nbdebug.check_data(tensors_of_a_long_tail(tmp_path), num_classes=8, progress=False)
    assert report.notes == (
        "The fullest of 7 labels is 0 (90 rows), the emptiest 6 (1).",
        "Labels without a row: 7.",
    )


def test_one_text_in_another_language_is_named_among_many() -> None:
    rows = [{"text": text} for text in reviews()]
    rows[7] = {"text": "das ist ein satz in einer ganz anderen sprache"}
    report = nbdebug.check_data(rows, tokenizer=encoded, unk_id=1, progress=False)
    assert report.facts["items"] == {7: "data/unknown-tokens"}
