"""Rules: from the problems of a set to named causes, one for each code, with its items and a cure that writes copies.

One item has one problem: the first of these that it has, in the order in which they stand here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.text import clip, listed
from nbdebug.tools.data.cures import DataCure, DataFacts, Problem, fixes

DataRule = Callable[[DataFacts], Finding | None]
ITEMS: dict[str, DataRule] = {}
"""The rules of items, by code: what lies deeper comes first."""
STREAM: dict[str, DataRule] = {}
"""The rules of loaders, by code, most fundamental first."""


def first_of_each(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """One problem for each item: that whose code comes first in the order of the catalogue."""
    order = {code: place for place, code in enumerate(ITEMS)}
    best: dict[str | int, Problem] = {}
    for problem in sorted(problems, key=lambda p: (p.guess, order[p.code])):
        best.setdefault(problem.item, problem)
    return tuple(best.values())


def names(what: str, cure: DataCure | None = None, **page: str) -> None:
    """Declare the rule of a code. what: "code: what is said of one of its items|of several"; page: as `rule` takes it
    (the title is what is said of one, if none is given; the fix names the cure), or nothing: another chapter has it."""
    code, _, sentence = what.partition(": ")
    one, _, several = sentence.partition("|")

    def said(problems: Sequence[Problem]) -> str:
        shown, n = listed([clip(str(problem.item), 60) for problem in problems]), len(problems)
        return f"{n:,} {several}: {shown}" if n > 1 else f"1 {one}: {shown} ({problems[0].detail})"

    title, cures = f"{'An' if one[0] in 'aeiou' else 'A'} {one}.", functools.partial(fixes, cure, page.get("fix", ""))
    _declare(ITEMS, f"data/{code}", said, cures, {"title": title, **page} if page else {})


sounds = functools.partial(names, reference="https://python-soundfile.readthedocs.io")


def stream(code: str, cure: str, **page: str) -> None:
    """Declare the rule of what a loader does. Its finding's title is what the first problem says."""
    page = {"reference": "https://docs.pytorch.org/docs/stable/data.html", **page}

    def said(problems: Sequence[Problem]) -> str:
        return problems[0].detail + (f"; and {len(problems) - 1:,} more" if len(problems) > 1 else "")

    _declare(STREAM, code, said, lambda *facts: (Fix(page["fix"], cure),), page if "title" in page else {})


def _declare(rules: dict[str, DataRule], code: str, said: Any, cures: Any, page: Mapping[str, str]) -> None:
    def check(facts: DataFacts) -> Finding | None:
        problems = facts.of(code)
        if not problems:
            return None
        items = [problem.item for problem in problems]
        each = [{"item": problem.item, "detail": problem.detail} for problem in problems]
        evidence = {"where": [str(item) for item in items[:20]], "items": len(items), "each": each}
        return Finding(code, said(problems), evidence=evidence, fixes=cures(code, items, facts))

    check.__qualname__ = f"rule.{code}"
    rules[code] = rule(code=code, **page)(check) if page else check


# -- of an item --------------------------------------------------------------------------------------------------------

names(
    "unread-extension: file is passed over by the loader|files are passed over by the loader",
    DataCure("(target / name).rename((target / name).with_suffix(pathlib.Path(name).suffix.lower()))", "file"),
    symptom="An epoch has fewer samples than the folder has files; there is no error and no warning.",
    cause="Endings are compared as they stand: `.JPG`, as cameras and phones write it, is not `.jpg`, nor is `.jpeg`.",
    confirm="Compare `len(dataset)` with the number of files, by ending.",
    fix="Give them small letters in a copy (or compare `path.suffix.lower()`).",
    reference="https://docs.python.org/3/library/pathlib.html#pathlib.PurePath.suffix",
)
names(
    "unreadable-file: entry can't be read|entries can't be read",
    symptom="FileNotFoundError or PermissionError in the middle of an epoch; or the loader waits for ever.",
    cause="A link leads to nothing or to a folder above it, rights are missing, or it is a FIFO, a socket or a device.",
    confirm="`ls -lL` on the entry.",
    fix="Mend the link or the rights, or take the entry away.",
    reference="https://docs.python.org/3/library/os.html#os.stat",
)
names(
    "oversized-file: file is larger than is read|files are larger than is read",
    symptom="The loader's worker is killed, or Pillow raises DecompressionBombError.",
    cause="A picture of billions of pixels in a few bytes, or a caption of gigabytes: made by accident, or on purpose.",
    confirm="`Image.open(path).size` reads the head alone; `ls -l` shows bytes.",
    fix="Take it out of the set.",
    reference="https://pillow.readthedocs.io/en/stable/reference/limits.html",
)
names(
    "unfinished-file: file was never finished|files were never finished",
    DataCure("pathlib.Path('new.tmp').write_text(json.dumps(progress))\nos.replace('new.tmp', path)"),
    symptom="JSONDecodeError when a preprocessing run goes on; a temporary file is taken for data.",
    cause="Its program was stopped: a progress file was written in place, a download left its temporary file.",
    confirm="The end of the file is missing, or its name ends in .tmp or .part.",
    fix="Take it away and make it again; from now on write to a temporary name, then `os.replace` it.",
    reference="https://docs.python.org/3/library/os.html#os.replace",
)
names("corrupt-image: picture does not open|pictures do not open")
names("truncated-image: picture opens, and its pixels end early|pictures open, and their pixels end early")
sounds(
    "corrupt-audio: sound does not open, or ends early|sounds do not open, or end early",
    symptom="LibsndfileError, EOFError or a short batch, in the middle of an epoch.",
    cause="A download or a recording stopped; the head promises more than there is.",
    confirm="`soundfile.read(path)`, and its length beside `soundfile.info(path).frames`.",
    fix="Fetch it again, or leave it out.",
)
names(
    "item-fails: item can't be made|items can't be made",
    DataCure("dataset[index]"),
    symptom="Training ends in the middle of an epoch, in a worker.",
    cause="The data set's own `__getitem__` fails on it.",
    confirm="`dataset[index]`.",
    fix="Look at the first error by itself: `%explain` after it names the cause.",
    reference="https://docs.pytorch.org/docs/stable/data.html",
)
names(
    "format-mismatch: file holds another format than its name says|files hold another format than their names say",
    DataCure("image.convert('RGB').save(target / name)", "picture"),
    symptom="Viewers show it; a decoder for one format (turbojpeg, DALI, tf.io.decode_jpeg) refuses or skips it.",
    cause="It was renamed, or saved from a web page, in place of being converted.",
    confirm="`Image.open(path).format`, or the file's first bytes.",
    fix="Write copies in the format of the name, or under the right name.",
    reference="https://pillow.readthedocs.io/en/stable/handbook/image-file-formats.html",
)
names(
    "exif-orientation: picture is turned by its EXIF tag alone|pictures are turned by their EXIF tags alone",
    DataCure("ImageOps.exif_transpose(image).save(target / name, quality=95)", "picture"),
    symptom="Portraits lie on their side in training, and upright in every viewer; boxes and masks do not fit.",
    cause="Phones store pixels as the sensor has them, with a tag. Viewers and OpenCV turn them; Pillow does not.",
    confirm="`Image.open(path).getexif().get(0x0112)` is neither 1 nor None.",
    fix="Write turned copies, or turn pictures in the loader.",
    reference="https://pillow.readthedocs.io/en/stable/reference/ImageOps.html#PIL.ImageOps.exif_transpose",
)
names(
    "wrong-image-size: picture has another size|pictures have another size",
    DataCure("ImageOps.fit(image, <size>).save(target / name)", "picture"),
    symptom="stack expects each tensor to be equal size, in some batches; never with a batch of one.",
    cause="Tiles at the edge, pictures from another source, or a resize that keeps the shape.",
    confirm="Count `Image.open(path).size` over the set.",
    fix="Scale and cut copies to the size, or do so in the transform.",
    reference="https://docs.pytorch.org/vision/stable/transforms.html",
)
names(
    "image-too-small: picture is too small|pictures are too small",
    symptom="Required crop size is larger than the input; an empty range in a random crop; blurred samples.",
    cause="Thumbnails among photographs.",
    confirm="The smallest of `min(Image.open(path).size)`.",
    fix="Leave them out. Enlarging makes them fit, and blurred.",
    reference="https://docs.pytorch.org/vision/stable/generated/torchvision.transforms.RandomCrop.html",
)
names(
    "wrong-image-mode: picture has another mode (channels, depth)|pictures have another mode (channels, depth)",
    DataCure("image.convert(<mode>).save(target / name)", "picture"),
    symptom="Expected input to have 3 channels, but got 4 (or 1), in some batches.",
    cause="An alpha channel, a palette, greyscale, CMYK or 16 bits: viewers show all of them alike.",
    confirm="Count `Image.open(path).mode` over the set.",
    fix="Write copies in the right mode, or convert in the loader; a transparent ground has to be laid on one.",
    reference="https://pillow.readthedocs.io/en/stable/handbook/concepts.html#modes",
)
names(
    "mask-size-mismatch: mask has another size than its picture|masks have another size than their pictures",
    DataCure("mask = mask.resize(image.size, Image.NEAREST)  # NEAREST: no value in between"),
    symptom="The target size must be the same as the input size; or the loss stays high at edges.",
    cause="Pictures were resized and masks not, or width and height were exchanged.",
    confirm="Compare `.size` of both files.",
    fix="Resize the mask to its picture, if it shows the same part of it; else make it again.",
    reference="https://pillow.readthedocs.io/en/stable/handbook/concepts.html#filters",
)
names(
    "caption-encoding: caption is not UTF-8|captions are not UTF-8",
    DataCure(
        "marked = data[:2] in (b'\\xff\\xfe', b'\\xfe\\xff')\n"
        "coding = 'utf-16' if marked else 'utf-16-le' if b'\\0' in data else 'cp1252'\n"
        "caption.write_text(data.decode(coding), encoding='utf-8')",
        "caption",
    ),
    symptom="UnicodeDecodeError: 'utf-8' codec can't decode byte 0x92, at another step each time.",
    cause="An editor on Windows saved it as Windows-1252 or UTF-16; typographic quotes and accents differ there.",
    confirm="`path.read_bytes().decode('utf-8')`.",
    fix="Write copies in UTF-8, and read them.",
    reference="https://docs.python.org/3/howto/unicode.html",
)
names(
    "caption-missing: picture has no caption|pictures have no caption",
    symptom="The adapter learns the look of the set and does not follow the prompt; no error.",
    cause="A trainer takes an empty prompt where no file stands beside the picture: it has another name, or ending.",
    confirm="For each picture, look for the file of the same name.",
    fix="Write the captions, or leave the pictures out.",
    reference="https://github.com/kohya-ss/sd-scripts/blob/main/docs/config_README-en.md",
)
names(
    "caption-empty: caption is empty|captions are empty",
    symptom="The model drifts towards the set even with an empty prompt.",
    cause="The tagger failed on the picture, and its file was written all the same.",
    confirm="`path.read_text().strip()`.",
    fix="Write the captions, or leave the pictures out.",
    reference="https://github.com/kohya-ss/sd-scripts/blob/main/docs/config_README-en.md",
)
names(
    "trigger-missing: caption lacks the trigger|captions lack the trigger",
    DataCure("caption.write_text(<trigger> + ', ' + data.decode('utf-8-sig'), encoding='utf-8')", "caption"),
    symptom="The trained adapter hardly reacts to its trigger.",
    cause="The word was put in front of the captions once, and later ones were written without it.",
    confirm="Look for the word in each caption, anywhere: shuffled captions have it elsewhere than in front.",
    fix="Write copies with the word in front.",
    reference="https://huggingface.co/docs/diffusers/training/lora",
)
names(
    "caption-too-short: caption has too few words|captions have too few words",
    symptom="Prompts are followed for a part of the set only.",
    cause="A file name or a single tag stands in place of a sentence.",
    confirm="Count the words; in Chinese, Japanese and Thai each character is one.",
    fix="Write them anew.",
    reference="https://huggingface.co/docs/diffusers/training/text2image",
)
names(
    "caption-same: caption is that of nearly all others|captions are the same",
    DataCure("caption.unlink()", "caption"),
    symptom="The adapter makes the set's pictures whatever the prompt says.",
    cause="The tagger failed, or a template was written beside each picture. Words are learnt where captions differ.",
    confirm="Count the captions: `collections.Counter(path.read_text() for path in folder.glob('*.txt'))`.",
    fix="Give one prompt to the trainer, and no captions.",
    reference="https://huggingface.co/docs/diffusers/training/dreambooth",
)
names(
    "wrong-sample-rate: sound has another sample rate|sounds have another sample rate",
    DataCure(
        "new = round(len(values) * <sample_rate> / rate)\n"
        "spectrum = numpy.fft.rfft(values, axis=0)[: new // 2 + 1]\n"
        "values = numpy.fft.irfft(spectrum, new, axis=0) * (new / len(values))\n"
        "soundfile.write(target / name, values.clip(-1, 1), <sample_rate>)",
        "sound",
    ),
    symptom="Speech is too fast or too deep for the model; alignment stays blurred. It plays well in any player.",
    cause="Recordings of several sources; the loader does not resample.",
    confirm="`soundfile.info(path).samplerate`.",
    fix="Write copies with the right rate, or resample in the loader.",
    reference="https://docs.pytorch.org/audio/stable/generated/torchaudio.functional.resample.html",
)
sounds(
    "wrong-channels: item has another number of channels|items have another number of channels",
    DataCure("soundfile.write(target / name, values.mean(1, keepdims=True).repeat(<channels>, 1), rate)", "sound"),
    symptom="Shapes do not match in some batches, or left and right are taken for two samples.",
    cause="Stereo recordings among mono ones.",
    confirm="`soundfile.info(path).channels`.",
    fix="Write copies with the mean of the channels, or average in the loader.",
)
sounds(
    "silent-audio: sound is silent|sounds are silent",
    symptom="The loss is nan in the batches that hold it, where features are scaled by their deviation.",
    cause="A muted microphone, or a conversion that failed.",
    confirm="`soundfile.read(path)[0].any()`.",
    fix="Leave it out.",
)
sounds(
    "clipped-audio: sound is clipped, flat at full scale|sounds are clipped, flat at full scale",
    symptom="Buzzing output; the quality of these samples stays poor.",
    cause="It was recorded or amplified too loud. What was above full scale is lost.",
    confirm="Runs of equal samples at the highest value.",
    fix="Record or convert it again, more softly; or leave it out.",
)
names(
    "file-missing: row names a file that is not there|rows name files that are not there",
    symptom="FileNotFoundError in the middle of an epoch.",
    cause="The files were moved or renamed, or a copy stopped.",
    confirm="`os.path.exists` for each row.",
    fix="Fetch the files, or leave the rows out.",
    reference="https://docs.python.org/3/library/os.path.html#os.path.exists",
)
names(
    "nonfinite-values: item has a value that is missing or not finite|items have values that are missing or not finite",
    symptom="The loss is nan, in some batches or from the first one on.",
    cause="An empty cell, a division by zero in the preparation, a number beyond float32.",
    confirm="`torch.isfinite(x).all()` for each batch.",
    fix="Fill or leave out these rows.",
    reference="https://pandas.pydata.org/docs/user_guide/missing_data.html",
)
names(
    "sentinel-value: item holds a number that stands for no measurement|items hold numbers that stand for no "
    "measurement",
    DataCure("rows = rows.replace(<missing>, float('nan')).dropna()  # or read with na_values=<missing>", "table"),
    symptom="Scaled by mean and deviation, nearly all values of a column are the same; the model predicts a flat line.",
    cause="Instruments and surveys write -9999, 999.9 or 1e20 where nothing was measured, and pandas reads a number.",
    confirm="`table.describe()`: the least or largest value is far from the quartiles.",
    fix="Read them as missing (`na_values`), then fill them or leave the rows out.",
    reference="https://pandas.pydata.org/docs/reference/api/pandas.read_csv.html",
)
names(
    "non-numeric: item holds text in place of a number|items hold text in place of numbers",
    DataCure(
        "for column in <columns>:\n"
        "    rows[column] = pandas.to_numeric(rows[column].str.replace(',', '.'), errors='coerce')\n"
        "rows = rows.dropna(subset=<columns>)",
        "table",
        guess=True,
    ),
    symptom="could not convert string to float; or the whole column becomes text, and is taken for categories.",
    cause="Units, signs of thousands, decimal commas, question marks for missing values.",
    confirm="`pandas.to_numeric(column, errors='coerce')` gives NaN there.",
    fix="Read them as numbers, and leave out what is none (or mend the texts).",
    reference="https://pandas.pydata.org/docs/reference/api/pandas.to_numeric.html",
)
names(
    "token-out-of-vocabulary: row holds a token beyond the vocabulary|rows hold tokens beyond the vocabulary",
    DataCure("model.resize_token_embeddings(len(tokenizer))"),
    symptom="index out of range in self, on the CPU; a device-side assertion on a card.",
    cause="Tokens were added to the tokenizer and the model's embedding was not enlarged; or the ids are another's.",
    confirm="The largest id beside `model.get_input_embeddings().num_embeddings`.",
    fix="Enlarge the embedding.",
    reference="https://huggingface.co/docs/transformers/main_classes/model",
)
names(
    "unknown-tokens: text is unknown to the tokenizer in large part|texts are unknown to the tokenizer in large part",
    symptom="The loss falls fast, and what comes out is full of the unknown token.",
    cause="The tokenizer is of another language or domain, or wants small letters; or the text's encoding is broken.",
    confirm="The share of `tokenizer.unk_token_id` among the ids.",
    fix="Take a tokenizer that was trained on such text, or that falls back to bytes; prepare the text as its own was.",
    reference="https://huggingface.co/docs/transformers/tokenizer_summary",
)
names(
    "all-padding: row holds no token but padding|rows hold no token but padding",
    symptom="The loss or an attention is nan about once in an epoch.",
    cause="An empty line was tokenized.",
    confirm="Count the tokens that are no padding, by row.",
    fix="Leave empty texts out before tokenizing.",
    reference="https://huggingface.co/docs/transformers/pad_truncation",
)
names(
    "sequence-too-long: row is longer than the model has positions|rows are longer than the model has positions",
    DataCure("encoding = tokenizer(text, truncation=True, max_length=<max_length>)"),
    symptom="index out of range in self, in the embedding of positions; or the end is cut in silence.",
    cause="Truncation was not asked for, or to another length than the model's.",
    confirm="`max(len(row['input_ids']) for row in dataset)` beside `max_position_embeddings`.",
    fix="Cut them in the tokenizer.",
    reference="https://huggingface.co/docs/transformers/pad_truncation",
)
names(
    "labels-misaligned: row has not as many labels as tokens|rows have not as many labels as tokens",
    DataCure("labels = [-100 if word is None else word_labels[word] for word in encoding.word_ids()]"),
    symptom="Expected input batch_size to match target batch_size; or labels are shifted against their words.",
    cause="Words were split into several tokens, and special tokens added, after labelling.",
    confirm="`len(row['labels'])` beside `len(row['input_ids'])`.",
    fix="Spread the labels over the tokens of each word, and -100 over special tokens.",
    reference="https://huggingface.co/docs/transformers/tasks/token_classification",
)
names(
    "eos-missing: row lacks its end token|rows lack their end tokens",
    DataCure("ids = tokenizer(text)['input_ids'] + [tokenizer.eos_token_id]"),
    symptom="Generation does not stop.",
    cause="The tokenizer does not add it by itself, or a part of the set was prepared without it.",
    confirm="The last token that is no padding, by row.",
    fix="Append the end token before padding.",
    reference="https://huggingface.co/docs/transformers/main_classes/tokenizer",
)
names(
    "label-out-of-range: item has a label that is no class|items have labels that are no class",
    DataCure("rows[<label>] = rows[<label>].astype(float).astype(int) - 1", "table", guess=True),
    symptom="Target is out of bounds on the CPU, an assertion on a card.",
    cause="Labels count from 1, a class was added, or a value stands for something else (255 in masks).",
    confirm="Smallest and largest label beside the outputs of the last layer.",
    fix="Count from 0, or pass `ignore_index` to the loss.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
)
names(
    "label-variants: item has a label that is written otherwise elsewhere|items have labels that are written otherwise "
    "elsewhere",
    DataCure("rows[<label>] = rows[<label>].replace(<meant>)", "table"),
    title="One class is written in several ways.",
    symptom="There are more classes than were meant, some with few rows; or a target is out of bounds.",
    cause="Labels typed by hand or joined from several sources differ in spaces, capitals or accents; texts that are "
    "not equal are classes of their own.",
    confirm="`sorted(map(repr, set(labels)))`.",
    fix="Write each class in one way, before the classes are numbered: `labels.str.strip().str.lower()`.",
    reference="https://pandas.pydata.org/docs/user_guide/text.html",
)
names(
    "stray-class-folder: folder beside those of the classes is a program's own|folders beside those of the classes are "
    "a program's own",
    DataCure("for folder in root.rglob('.ipynb_checkpoints'):\n    shutil.rmtree(folder)"),
    title="A hidden folder stands where each folder is a class.",
    symptom="There is one class more than was meant: a target is out of bounds, or each class has the name of another. "
    "`ls` does not show the folder.",
    cause="Jupyter keeps copies of opened files in `.ipynb_checkpoints`, macOS writes `__MACOSX` into archives. "
    "ImageFolder takes every folder for a class, sorted by name, and a dot comes first.",
    confirm="`dataset.classes`.",
    fix="Delete the folder.",
    reference="https://github.com/pytorch/vision/issues/2831",
)
names(
    "invalid-box: row has a box that is none|rows have boxes that are none",
    title="A box has no area, or lies beyond the picture.",
    symptom="All bounding boxes should have positive height and width; or the detector's loss is nan.",
    cause="Boxes were scaled and rounded, corners exchanged, or x, y, width, height taken for two corners.",
    confirm="0 <= x1 < x2 <= width, and the same for y.",
    fix="Leave these boxes out, or mend them in the tool that made them.",
    reference="https://docs.pytorch.org/vision/stable/models/faster_rcnn.html",
)
names(
    "empty-text: row has no text|rows have no text",
    symptom="A length of zero is refused, or a mean over no words is nan.",
    cause="Empty lines of the source became rows.",
    confirm="`text.strip()` for each row.",
    fix="Leave these rows out.",
    reference="https://pandas.pydata.org/docs/reference/api/pandas.Series.str.strip.html",
)
names(
    "conflicting-labels: item has the input of one of another label|items have the input of ones of another label",
    title="The same input has two labels.",
    symptom="No model gets beyond a certain accuracy on the training set.",
    cause="Lists of classes were joined, and an item stands in two of them; or several people labelled it.",
    confirm="Group the rows by their input and count the labels.",
    fix="Decide for one label, or make it a task of several labels.",
    reference="https://docs.cleanlab.ai/stable/cleanlab/datalab/guide/issue_type_description.html",
)
names(
    "duplicate-across-splits: item of a later split is in an earlier one|items of later splits are in earlier ones",
    symptom="Validation is far better than on new data.",
    cause="The set was split at random while it held items twice: under two names, saved again, mirrored.",
    confirm="Open both.",
    fix="Take the copy out of the later split. Split by source (person, video, page), not by file.",
    reference="https://scikit-learn.org/stable/common_pitfalls.html#data-leakage",
)
names(
    "duplicate-within-split: item is a copy in its split|items are copies in their split",
    symptom="Some items weigh twice; after a random split, copies stand on both sides.",
    cause="Sources were merged, or a picture was saved again: scaled, mirrored, in another quality.",
    confirm="Open both.",
    fix="Keep the better one, and split only then.",
    reference="https://cleanvision.readthedocs.io",
)
names(
    "index-column: column counts the rows|columns count the rows",
    symptom="Good scores that fall when the rows are shuffled; a column `Unnamed: 0`.",
    cause="`to_csv` writes the index as a column, and `read_csv` reads it as data.",
    confirm="The column counts up by one.",
    fix="Write with `index=False`, or read with `index_col=0`.",
    reference="https://pandas.pydata.org/docs/reference/api/pandas.DataFrame.to_csv.html",
)
names(
    "target-leakage: column gives the label away|columns give the label away",
    symptom="Nearly no error from the first epochs on, and none of it on new data.",
    cause="The column is made from the label, or is written when the outcome is known.",
    confirm="Predict the label from this column alone.",
    fix="Take the column out of the features.",
    reference="https://scikit-learn.org/stable/common_pitfalls.html#data-leakage",
)
names(
    "color-shift: folder has other colours than the others|folders have other colours than the others",
    DataCure("Image.fromarray(numpy.asarray(image)[..., ::-1]).save(target / name, quality=95)", "folder", guess=True),
    symptom="Validation is worse than it should be, or samples have a tint.",
    cause="Red and blue were exchanged (OpenCV reads BGR), or a set was normalised or exported in another way.",
    confirm="Look at pictures of both; compare mean red, green and blue by folder.",
    fix="Exchange red and blue, in a copy; or convert the folder again, from its source.",
    reference="https://docs.opencv.org/4.x/d8/d01/group__imgproc__color__conversions.html",
)


# -- of a stream -------------------------------------------------------------------------------------------------------

stream(
    "data/batch-fails",
    "loader.dataset[0]",
    title="A batch can't be made.",
    symptom="RuntimeError: stack expects each tensor to be equal size; or an error of the data set, in a worker.",
    cause="An item fails by itself, or the items of a batch differ in shape.",
    confirm="`loader.dataset[index]` for the items of the batch.",
    fix="Look at the item by itself; pad or resize in `collate_fn` where items differ in shape.",
)
stream(
    "data/no-batches",
    "loader = DataLoader(dataset, batch_size=min(batch_size, len(dataset)), drop_last=False)",
    title="The loader gives no batch.",
    symptom="The loop ends at once; the loss is undefined or 0/0; StopIteration.",
    cause="`drop_last=True`, and the set is smaller than a batch; or the set is empty.",
    confirm="`len(loader)` is 0.",
    fix="Keep the last batch, or make batches smaller.",
)
stream(
    "data/one-shot",
    "class Rows(torch.utils.data.IterableDataset):\n    def __iter__(self):\n        yield from make_rows()",
    title="The stream can be read once.",
    symptom="From the second epoch on there is no step, and no error.",
    cause="The data set is a generator or an iterator: when it is at its end, it stays there.",
    confirm="`iter(dataset) is dataset`.",
    fix="Begin anew in each epoch: a class whose `__iter__` opens the source.",
)
stream(
    "data/exhausted",
    "step = 0\nwhile step < max_steps:\n    for batch in itertools.islice(loader, max_steps - step):\n"
    "        step += 1",
    title="The data end before the planned steps.",
    symptom="Training stops early, the schedule of the learning rate is not run to its end; StopIteration.",
    cause="The number of steps was planned for more data, more epochs or a smaller batch.",
    confirm="Batches of an epoch times epochs, beside `max_steps`.",
    fix="Begin anew when the data are at their end, or plan fewer steps.",
    reference="https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments.max_steps",
)
stream(
    "data/not-sharded",
    "info = torch.utils.data.get_worker_info()\nrows = itertools.islice(rows, info.id, None, info.num_workers)",
    title="Workers or ranks read the same rows.",
    symptom="An epoch is as many times longer as there are workers; more cards give no better model.",
    cause="Each worker has a copy of an iterable data set, and each rank its own loader: nothing divides the rows.",
    confirm="Count the rows with `num_workers=0`, or compare the rows of two ranks.",
    fix="Each worker (and each rank) takes every n-th row; for map-style sets `DistributedSampler`.",
)
stream(
    "data/uneven-ranks",
    "steps = min(steps_of_each_rank)\nfor batch in itertools.islice(loader, steps): ...",
    title="Ranks have different numbers of batches.",
    symptom="Training hangs at the end of an epoch, until a timeout of the collective.",
    cause="The rows do not divide by the ranks, and nothing fills up or leaves out the rest.",
    confirm="`len(list(loader))` on each rank.",
    fix="As many batches for each; or a sampler that fills up, or DistributedDataParallel's `join`.",
    reference="https://docs.pytorch.org/tutorials/advanced/generic_join.html",
)
stream(
    "training/same-seed-workers",
    "rng = numpy.random.default_rng(torch.initial_seed())",
    fix="Seed by torch in each worker.",
)
stream(
    "data/same-order",
    "generator = torch.Generator().manual_seed(self.seed + self.epoch)",
    title="The order is shuffled once, and the same in each epoch.",
    symptom="The loss has the same small waves in each epoch; results are a little worse.",
    cause="The sampler seeds its generator anew in `__iter__`, or `set_epoch` does not reach it.",
    confirm="`list(sampler) == list(sampler)`.",
    fix="Mix the epoch into the seed, and call `set_epoch` before each epoch.",
)
stream(
    "data/stale-worker-copy",
    "loader = DataLoader(dataset, num_workers=n)",
    title="A change of the data set does not reach the workers.",
    symptom="A resumed run begins at row 0, although `skip_samples` was set.",
    cause="Workers hold a copy of the data set from when they were started; persistent ones are started once.",
    confirm="Compare the first batch with that of a new loader.",
    fix="Make the loader anew after the data set was changed, or keep the number in shared memory.",
)
stream(
    "data/skip-kept",
    "dataset.skip_samples = 0",
    title="Rows that were skipped to resume are skipped in later passes, too.",
    symptom="After resuming each epoch is shorter, and so is validation on the same set.",
    cause="The number of rows to skip is never set back.",
    confirm="Count the batches of the two passes after resuming.",
    fix="Take it back when the resumed pass is over, in the loop or where `__iter__` ends.",
    reference="https://docs.pytorch.org/data/main/stateful_dataloader_tutorial.html",
)
stream(
    "data/batch-without-labels",
    "if (batch['labels'] != -100).any():\n    loss = step(batch)",
    title="A batch has no label that counts.",
    symptom="The loss is nan in single batches: a mean over no label.",
    cause="Prompts fill the whole length and are masked with -100, or texts were cut before the answer.",
    confirm="`(batch['labels'] != -100).sum()`.",
    fix="Leave such batches out; or a longer `max_length`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
)
stream(
    "data/nonfinite-values",
    "batch = {k: v[torch.isfinite(v).flatten(1).all(1)] for k, v in batch.items()}",
    fix="Fill or leave out these rows.",
)
