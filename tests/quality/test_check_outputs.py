"""check_outputs(): 30 healthy sets are left in peace; planted copies of seven kinds, loops and ends are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import nbdebug
from tests.quality import outputs


def test_thirty_healthy_sets_are_left_in_peace() -> None:
    sets = [*outputs.healthy_pictures(), *outputs.healthy_texts()]
    assert len(sets) == 30
    for number, (generated, training) in enumerate(sets):
        report = nbdebug.check_outputs(generated, training=training)
        assert not report.findings, (number, report.findings[0].title)
        alone = nbdebug.check_outputs(generated)
        assert not alone.findings and alone.unchecked, (number, alone)


@pytest.mark.parametrize("change", outputs.CHANGES)
@pytest.mark.parametrize("kind", [outputs.scene, outputs.grey])
def test_a_changed_copy_is_found(kind: object, change: str) -> None:
    rng = np.random.default_rng(9)
    training = outputs.whole([kind(rng) for _ in range(60)])  # type: ignore[operator]
    generated = outputs.whole([kind(rng) for _ in range(10)])  # type: ignore[operator]
    for row, match in ((2, 40), (7, 11)):
        generated[row] = outputs.CHANGES[change](training[match])
    report = nbdebug.check_outputs(generated, training=training)
    assert report.findings[0].code == "quality/memorized" and report.findings[0].where.samples == (2, 7)
    assert [pair["training picture"] for pair in report.findings[0].evidence["pairs"]] == [40, 11]
    assert len(report.plot("gallery")["pictures"]) == 4


def test_a_copy_in_a_set_of_nearly_one_picture() -> None:
    """What differs is a tenth of a picture: less than what some changes of a copy do."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        still = outputs.scene(rng)
        training, generated = (
            outputs.whole([still + 0.1 * (outputs.scene(rng) - 127) for _ in range(count)]) for count in (60, 12)
        )
        assert not nbdebug.check_outputs(generated, training=training).findings
        for change in ("as it is", "flipped", "moved", "brighter", "resized"):
            changed = generated.copy()
            changed[3] = outputs.CHANGES[change](training[20])
            found = nbdebug.check_outputs(changed, training=training).findings
            assert found and found[0].code == "quality/memorized" and found[0].where.samples == (3,), (seed, change)


def test_pictures_come_in_many_forms() -> None:
    rng = np.random.default_rng(2)
    training = outputs.whole([outputs.scene(rng) for _ in range(30)])
    generated = outputs.whole([outputs.scene(rng) for _ in range(8)])
    generated[3] = training[5]
    floats = torch.from_numpy(generated).permute(0, 3, 1, 2).float()
    for form in (floats / 255, floats / 127.5 - 1, [outputs.Image.fromarray(p) for p in generated], list(generated)):
        assert nbdebug.check_outputs(form, training=training).findings[0].where.samples == (3,)


@pytest.mark.parametrize(("gain", "name"), [((0.9, 0.95, 1.25), "blue"), ((0.9, 1.2, 0.9), "green"),
                                            ((1.15, 1.15, 0.8), "yellow")])  # fmt: skip
def test_the_tint_is_named(gain: tuple[float, ...], name: str) -> None:
    rng = np.random.default_rng(4)
    training = outputs.whole([outputs.scene(rng) for _ in range(100)])
    generated = outputs.whole([outputs.scene(rng, gain) for _ in range(60)])
    report = nbdebug.check_outputs(generated, training=training)
    assert report.findings[0].code == "quality/color-shift" and report.findings[0].evidence["where"] == [name]


def test_vectors_and_things_of_another_kind() -> None:
    rng = np.random.default_rng(0)
    training, generated = rng.normal(size=(50, 8)), rng.normal(size=(9, 8))
    generated[4] = training[20] + 1e-3
    assert nbdebug.check_outputs(generated, training=training).findings[0].where.samples == (4,)
    by = lambda things: np.array([[t["a"], t["b"]] for t in things])
    things = [{"a": float(n), "b": float(n % 7)} for n in range(40)]
    assert not nbdebug.check_outputs([{"a": 0.5, "b": 0.5}], training=things, embed=by).findings
    assert nbdebug.check_outputs([things[3]], training=things, embed=by).findings


def test_evaluation_rows_are_found_though_case_and_words_were_changed() -> None:
    rng = outputs.random.Random(1)
    training = [outputs.sentence(rng, 16) for _ in range(80)]
    rows = [outputs.sentence(rng, 16) for _ in range(12)]
    long = [text for text in training if len(text.split()) >= 12]
    rows[2] = long[0].upper().replace(".", " !")
    parts = long[1].split()
    rows[5] = " ".join([*parts[:8], "really", *parts[8:]])
    rows[9] = "Question: " + long[2]
    report = nbdebug.check_outputs(evaluation=rows, training=training)
    assert report.findings[0].code == "quality/evaluation-overlap" and report.findings[0].where.samples == (2, 5, 9)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="takes what a model made"):
        nbdebug.check_outputs()
    with pytest.raises(ValueError, match="training="):
        nbdebug.check_outputs(evaluation=["a"])
    with pytest.raises(ValueError, match="of one form"):
        nbdebug.check_outputs(["a text"], training=np.zeros((3, 8, 8, 3), np.uint8))
    with pytest.raises(TypeError, match="takes pictures, texts or vectors"):
        nbdebug.check_outputs([object()])


def test_what_training_repeats_itself_is_no_copy() -> None:
    rng = outputs.random.Random(3)
    review = lambda: f"The {rng.choice(outputs.WORDS)} was {rng.choice(['fine', 'bad'])}, and I will come again."
    training = [review() for _ in range(200)]
    assert not nbdebug.check_outputs([review() for _ in range(30)], training=training).findings
    grid = np.random.default_rng(0).integers(-2, 3, (60, 3)).astype(float)
    assert not nbdebug.check_outputs(grid[50:], training=grid[:50]).findings


def test_noise_on_flat_pictures_and_a_limit_in_characters() -> None:
    rng = np.random.default_rng(5)
    training = outputs.whole([outputs.digit(rng) for _ in range(40)])
    for grain, codes in ((20, ["quality/noisy"]), (3, [])):  # the second is not seen
        generated = outputs.whole([outputs.digit(rng) + rng.normal(0, grain, (32, 32, 3)) for _ in range(12)])
        assert [f.code for f in nbdebug.check_outputs(generated, training=training)] == codes
    words = outputs.random.Random(2)
    long = [" ".join(outputs.sentence(words) for _ in range(16))[:500].rsplit(" ", 1)[0] for _ in range(5)]
    short = [outputs.sentence(words) for _ in range(8)]
    report = nbdebug.check_outputs(short + [text.rstrip(".") for text in long])
    assert report.findings[0].code == "quality/truncated" and report.findings[0].where.samples == (8, 9, 10, 11, 12)


@pytest.mark.parametrize("kind", [outputs.speech, outputs.squares])
def test_sounds(kind: object) -> None:
    rng = np.random.default_rng(1)
    training = [kind(rng) for _ in range(32)]  # type: ignore[operator]
    generated = [kind(rng) for _ in range(10)]  # type: ignore[operator]
    assert not nbdebug.check_outputs(generated, training=training, sample_rate=outputs.RATE).findings
    generated[3], generated[8] = training[20] * 0.6, np.round(training[31] * 32767).astype(np.int16)
    report = nbdebug.check_outputs(generated, training=training, sample_rate=outputs.RATE)
    assert [(f.code, f.where.samples) for f in report] == [("quality/memorized", (3, 8))]
    report = nbdebug.check_outputs([*generated[:3], *[generated[5]] * 3, generated[5] * 0.9], sample_rate=outputs.RATE)
    assert [f.code for f in report] == ["quality/mode-collapse"]
    with pytest.raises(TypeError, match="a sound is"):
        nbdebug.check_outputs(np.zeros((2, 3, 4, 5)), sample_rate=8000)
