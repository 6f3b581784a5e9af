"""Samples that can't be put together: which entry of which sample, in this process and in a worker."""

from __future__ import annotations

import collections
import gc

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset

import nbdebug


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A loader that failed waits so many seconds for its workers (torch's own: 5)."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()


CODE = "error/collate-mismatch"


class Made(Dataset):
    """Samples made by a function of their index."""

    def __init__(self, make, count=8):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.make(i)


Cloud = collections.namedtuple("Cloud", "points label")


class Pictures(Dataset):
    def __init__(self, odd):
        self.pictures = [torch.rand(3, *((24, 20) if i == odd else (20, 24))) for i in range(8)]

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {"image": self.pictures[i], "label": i}


class Waves(IterableDataset):
    def __iter__(self):
        for i in range(8):
            yield {"wave": torch.zeros(100 if i < 6 else 90)}


def explained(dataset, **settings):
    loader = DataLoader(dataset, batch_size=4, **settings)
    with pytest.raises(Exception) as caught:
        for _batch in loader:
            pass
    report = nbdebug.explain(caught.value, names={})
    return report, str(report.full())


def only(report):
    (finding,) = report.findings
    assert finding.code == CODE
    assert finding.where.phase == "input" and finding.fixes
    return finding


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda i: (torch.zeros(i % 2 + 1, 3), i), ["`0`", "[2, 3]", "[1, 3]", "pad_sequence"]),
        (lambda i: {"x": torch.zeros(2), **({"mask": 1} if i != 6 else {})}, ["Sample 6 of", "`mask`", "setdefault"]),
        (lambda i: None if i == 2 else torch.zeros(2), ["Sample 2 of", "is None", "is not None"]),
        (lambda i: (Image.new("RGB", (4, 4)), i), ["PIL `Image`", "`0`", "numpy.array"]),
        (lambda i: {"ids": [1, 2, 3] if i != 1 else [1, 2]}, ["Sample 1 of", "a list of 2", "`ids`"]),
        (lambda i: {"t": np.array([None, {}], dtype=object)}, ["object", "`t`", "astype"]),
        (lambda i: torch.zeros(3 if i != 7 else 1, 8, 8), ["Sample 7 of", "[1, 8, 8]", "convert('RGB')"]),
        (lambda i: (torch.zeros(2), "cat" if i == 1 else 3), ["Sample 1 of", "a string", "a number"]),
        (lambda i: {"a": {"b": [torch.zeros(2), torch.zeros(3 if i == 5 else 2)]}}, ["Sample 5 of", "['a']['b'][1]"]),
        (lambda i: np.zeros((4, 4 + (i == 3)), "float32"), ["Sample 3 of", "[4, 5]", "(NumPy)"]),
        (lambda i: torch.zeros(2, 2) if i else torch.zeros(4), ["Sample 0 of", "reshape(2, 2)"]),
    ],
)
def test_the_odd_sample_and_its_entry_are_named(make, words) -> None:
    report, said = explained(Made(make))
    only(report)
    assert all(word in said for word in ["loader", *words]), said


def test_resizing_is_offered_and_shuffled_indices_are_the_data_sets() -> None:
    torch.manual_seed(1)
    report, said = explained(Pictures(odd=5), shuffle=True)
    finding = only(report)
    assert "Sample 5 of" in said and "swapped" in said
    assert "interpolate(image[None], size=(20, 24))" in finding.fixes[0].code


def test_padding_is_offered_and_the_function_works() -> None:
    dataset = Made(lambda i: {"tokens": torch.arange(i + 2), "label": i})
    finding = only(explained(dataset)[0])
    space = {"torch": torch}
    exec(finding.fixes[0].code.split("loader = ")[0], space)
    assert next(iter(DataLoader(dataset, batch_size=4, collate_fn=space["collate"])))["tokens"].shape == (4, 5)
    pairs = Made(lambda i: (i, torch.zeros(i + 1, 2), "x"))
    exec(only(explained(pairs)[0]).fixes[0].code.split("loader = ")[0], space)
    labels, padded, _ = next(iter(DataLoader(pairs, batch_size=4, collate_fn=space["collate"])))
    assert padded.shape == (4, 4, 2) and labels.tolist() == [0, 1, 2, 3]
    clouds = Made(lambda i: Cloud(torch.zeros(i + 1, 3), i))
    report, said = explained(clouds)
    assert "`points`" in said
    exec(only(report).fixes[0].code.split("loader = ")[0], space)
    batch = next(iter(DataLoader(clouds, batch_size=4, collate_fn=space["collate"])))
    assert batch.points.shape == (4, 4, 3) and batch.label.tolist() == [0, 1, 2, 3]


def test_an_iterable_data_set_has_positions_and_batches_alone() -> None:
    report, said = explained(Waves())
    assert only(report) and "Sample 2 of batch 1 of `loader`" in said and "`wave`" in said


def test_a_collate_function_of_the_users_own() -> None:
    def stacked(batch):
        return torch.stack([sample["x"] for sample in batch])

    report, said = explained(Made(lambda i: {"x": torch.zeros(3 if i == 2 else 4)}), collate_fn=stacked)
    assert only(report) and "`stacked`" in said and "Sample 2 of" in said and "`x`" in said

    class Collator:
        def __call__(self, batch):
            return {"mask": torch.tensor([sample["mask"] for sample in batch])}

    report, said = explained(Made(lambda i: {"x": 1, **({"mask": 1} if i != 6 else {})}), collate_fn=Collator())
    assert only(report) and "`Collator`" in said and "Sample 6 of" in said and "no `mask`" in said
    report, said = explained(Made(lambda i: {"x": 1}), collate_fn=Collator())
    assert not report.findings, "no sample has it: the function is wrong"
    report, said = explained(Made(lambda i: None if i == 3 else {"mask": 1}), collate_fn=Collator())
    assert only(report) and "Sample 3 of" in said and "is None" in said


def test_in_a_worker_the_sampler_and_the_message_tell() -> None:
    report, said = explained(Pictures(odd=5), num_workers=1)
    assert only(report) and all(
        word in said for word in ("Sample 5 of", "[3, 24, 20]", "pictures[5]", "image", "worker process 0")
    ), said
    report, said = explained(Made(lambda i: None if i == 6 else torch.zeros(2)), num_workers=1)
    assert only(report) and "A sample of batch 1 of `loader` is None or contains None" in said
    report, said = explained(Made(lambda i: torch.zeros(2, 1 + (i == 6))), num_workers=1)
    assert only(report) and "Sample 6 of" in said and "[2, 2]" in said
    report, said = explained(Made(lambda i: {"x": 1, **({"mask": 1} if i != 6 else {})}), num_workers=1)
    assert only(report) and "`mask`" in said


def test_without_a_loader() -> None:
    from torch.utils.data import default_collate

    with pytest.raises(RuntimeError) as caught:
        default_collate([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}])
    assert "`x`" in str(nbdebug.explain(caught.value, names={}))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_fails_by_itself_is_no_mismatch(workers) -> None:
    for make in (lambda i: 1 // 0, lambda i: {"a": 1}["b"], lambda i: torch.stack([torch.zeros(2), torch.zeros(3)])):
        report, said = explained(Made(make), num_workers=workers)
        assert CODE not in [finding.code for finding in report], said


class Clips(Dataset):
    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, i):
        return {"clip": torch.ones(*self.shape(i)), "rate": 8}

    def shape(self, i):
        return 2, self.sizes[i]


class Hidden(Clips):
    def __init__(self, sizes):
        self.sizes = tuple(sizes)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_axis_that_differs_is_padded(workers) -> None:
    report, said = explained(Clips([9, 9, 9, 9, 7, 9, 9, 9]), num_workers=workers)
    finding = only(report)
    assert "Sample 4 of" in said and "float32 [2, 7]" in said.replace("tensor of [", "tensor of float32 [")
    assert "pad_sequence" not in finding.fixes[0].code
    space = {"torch": torch, "tensors": [torch.ones(2, 7), torch.ones(2, 9)], "DataLoader": lambda *a, **k: None}
    exec(finding.fixes[0].code.split("loader = ")[0], space)
    batch = [Clips([7, 9])[0], Clips([7, 9])[1]]
    made = space["collate"](batch)["clip"]
    assert made.shape == (2, 2, 9) and made[0, :, 7:].sum() == 0


def test_samples_of_a_worker_are_read_without_running_the_data_set() -> None:
    report, said = explained(Hidden([7, 9, 9, 9]), num_workers=1)
    assert only(report) and "Sample 0 of `dataset`" in said and "[2, 7], but the others" in said


def test_several_axes_are_padded_at_once() -> None:
    report, _ = explained(Made(lambda i: {"map": torch.zeros(3 + (i == 2), 4 + (i == 1))}))
    code = only(report).fixes[0].code
    if "longest[::-1]" in code:
        space = {"torch": torch}
        exec(code.partition("\n\n")[0], space)
        assert space["collate"]([{"map": torch.ones(3, 5)}, {"map": torch.ones(4, 4)}])["map"].shape == (2, 4, 5)


def test_what_is_pasted_mends_a_trainer_and_a_model_that_keeps_its_number_of_classes(tmp_path):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    rows = [{"input_ids": list(range(10, 14 + i % 3)), "labels": i % 3} for i in range(16)]
    sizes = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 8}
    config = transformers.BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_labels=2)
    model = transformers.BertForSequenceClassification(config)
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    args = transformers.TrainingArguments(str(tmp_path), max_steps=2, per_device_train_batch_size=8, **quiet)
    trainer = transformers.Trainer(model=model, args=args, train_dataset=rows)
    space = {"torch": torch, "nn": torch.nn, "trainer": trainer, "model": model, "rows": rows}

    codes = []
    for _ in range(2):
        with pytest.raises((ValueError, IndexError)) as raised:
            trainer.train()
        found = nbdebug.explain(raised.value, names=space).findings[0]
        codes.append(found.code)
        exec(found.fixes[0].code, space)

    assert codes == ["error/collate-mismatch", "error/index-out-of-range"]
    assert trainer.train().global_step == 2
