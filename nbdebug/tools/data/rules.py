"""Rules: from the problems of a set to named causes, one for each code, with its items and a cure that writes copies."""

from __future__ import annotations

from collections.abc import Callable

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.text import clip, count, listed
from nbdebug.tools.data.facts import DataFacts

SHOWN = 8
"""Items that a cure lists; of more it takes them from `report.frame()`."""
Naming = Callable[[DataFacts], Finding | None]


def named(
    facts: DataFacts, code: str, noun: str, what: str, *fixes: tuple[str, str], plural: str = ""
) -> Finding | None:
    """The finding of a code. noun: of its items; what: the rest of the sentence, in singular and plural parted by |.
    fixes: title and code, in which BAD stands for the list of the items and ROOT for the folder."""
    problems = facts.of(f"data/{code}")
    if not problems:
        return None
    items = [problem.item for problem in problems]
    one, _, many = what.partition("|")
    verb = one if len(items) == 1 or not many else many
    title = f"{count(len(items), noun, plural)} {verb}: {listed([clip(str(i), 60) for i in items], 3)}"
    if len(items) == 1:
        title += f" ({problems[0].detail})"
    bad = repr(items) if len(items) <= SHOWN else f"set(report.frame().query(\"code == 'data/{code}'\")['item'])"
    cures = tuple(
        Fix(head, text.replace("BAD", bad).replace("ROOT", repr(facts.root))) for head, text in fixes or (LEAVE,)
    )
    rows = [{"item": problem.item, "detail": problem.detail} for problem in problems]
    numbers = {"where": [str(i) for i in items[:20]], "items": len(items), **dict(zip(("of",), (_total(facts, noun),)))}
    return Finding(
        f"data/{code}", title, evidence={k: v for k, v in numbers.items() if v} | {"each": rows}, fixes=cures
    )


def _total(facts: DataFacts, noun: str) -> int:
    return facts.total.get(noun, 0)


LEAVE = (
    "Leave them out, and fetch or make them again.",
    "bad = BAD\nitems = [item for item in items if item not in bad]",
)
WALK = "import pathlib\nfrom PIL import Image, ImageOps\nroot, copies = pathlib.Path(ROOT), pathlib.Path(ROOT + '_mended')\nfor name in BAD:\n    target = copies / name\n    target.parent.mkdir(parents=True, exist_ok=True)\n"
"""The beginning of cures that write copies of pictures into a folder of their own."""
ROWS = (
    "Leave these rows out.",
    "bad = BAD\ntable = table.drop(index=[int(str(item).rpartition('#')[2]) for item in bad])",
)


def corrupt_image(facts: DataFacts) -> Finding | None:
    """Its page stands beside that of the error, which the same file raises in a loader."""
    return named(facts, "corrupt-image", "picture", "does not open|do not open")


def truncated_image(facts: DataFacts) -> Finding | None:
    return named(
        facts, "truncated-image", "picture", "opens, and its pixels end early|open, and their pixels end early"
    )


@rule(
    code="data/unread-extension",
    title="The loader passes over files because of their endings.",
    symptom="An epoch has fewer samples than the folder has files; there is no error and no warning.",
    cause="Endings are compared as they stand: `.JPG` is not `.jpg`, and a list of endings seldom holds `.jpeg` and "
    "`.webp`. Cameras and phones write capitals.",
    confirm="Compare `len(dataset)` with the number of files, by ending.",
    fix="Compare `path.suffix.lower()`, or rename the files.",
    reference="https://docs.python.org/3/library/pathlib.html#pathlib.PurePath.suffix",
)
def unread_extension(facts: DataFacts) -> Finding | None:
    code = "paths = [path for path in pathlib.Path(ROOT).rglob('*') if path.suffix.lower() in {'.jpg', '.jpeg', '.png', '.webp'}]"
    return named(
        facts,
        "unread-extension",
        "file",
        "is passed over by the loader|are passed over by the loader",
        ("Compare endings in small letters.", code),
    )


@rule(
    code="data/unreadable-file",
    title="An entry of the folder can't be read.",
    symptom="FileNotFoundError or PermissionError in the middle of an epoch; or the loader waits for ever.",
    cause="A link leads to nothing or to a folder above it, the rights are missing, or the entry is a FIFO, a socket "
    "or a device and no file.",
    confirm="`ls -lL` on the entry.",
    fix="Mend the link or the rights, or take the entry away.",
    reference="https://docs.python.org/3/library/os.html#os.stat",
)
def unreadable_file(facts: DataFacts) -> Finding | None:
    return named(facts, "unreadable-file", "entry", "can't be read", plural="entries")


@rule(
    code="data/oversized-file",
    title="A file is too large to be what it should be.",
    symptom="The loader's worker is killed, or Pillow raises DecompressionBombError.",
    cause="A picture of billions of pixels in a few bytes, or a caption of gigabytes: made by accident, or on purpose.",
    confirm="`Image.open(path).size` reads the head alone; `ls -l` shows bytes.",
    fix="Take it out of the set.",
    reference="https://pillow.readthedocs.io/en/stable/reference/limits.html",
)
def oversized_file(facts: DataFacts) -> Finding | None:
    return named(facts, "oversized-file", "file", "is larger than is read|are larger than is read")


@rule(
    code="data/unfinished-file",
    title="A file was begun and never finished.",
    symptom="JSONDecodeError when a preprocessing run goes on; a temporary file is taken for data.",
    cause="The program that wrote it was stopped: a progress file was written in place, a download or a conversion "
    "left its temporary file.",
    confirm="The end of the file is missing, or its name ends in .tmp or .part.",
    fix="Take it away and let the step run again. Write to a temporary name, then `os.replace` it.",
    reference="https://docs.python.org/3/library/os.html#os.replace",
)
def unfinished_file(facts: DataFacts) -> Finding | None:
    code = "temporary = f'{path}.tmp'\nwith open(temporary, 'w') as file:\n    json.dump(progress, file)\nos.replace(temporary, path)"
    return named(
        facts,
        "unfinished-file",
        "file",
        "was never finished|were never finished",
        ("Make it again, and write it in one piece from now on.", code),
    )


@rule(
    code="data/format-mismatch",
    title="A file holds another format than its name says.",
    symptom="A decoder for one format (turbojpeg, DALI, tf.io.decode_jpeg) refuses the file, or a loader skips it; viewers "
    "show it.",
    cause="It was renamed, or saved from a web page, in place of being converted.",
    confirm="`Image.open(path).format`, or the file's first bytes.",
    fix="Convert a copy to the format of the name, or give the copy the right name.",
    reference="https://pillow.readthedocs.io/en/stable/handbook/image-file-formats.html",
)
def format_mismatch(facts: DataFacts) -> Finding | None:
    code = WALK + "    Image.open(root / name).convert('RGB').save(target)"
    return named(
        facts,
        "format-mismatch",
        "file",
        "holds another format than its name says|hold another format than their names say",
        ("Write copies in the format of the name.", code),
    )


@rule(
    code="data/exif-orientation",
    title="A picture stands upright by its EXIF tag alone.",
    symptom="Portraits lie on their side in training, and upright in every viewer; boxes and masks do not fit.",
    cause="Phones store the pixels as the sensor has them, with a tag that says how to turn them. Pillow and torchvision "
    "do not turn them by themselves; viewers and OpenCV do.",
    confirm="`Image.open(path).getexif().get(0x0112)` is neither 1 nor None.",
    fix="`ImageOps.exif_transpose(image)` in the loader, or once on copies.",
    reference="https://pillow.readthedocs.io/en/stable/reference/ImageOps.html#PIL.ImageOps.exif_transpose",
)
def exif_orientation(facts: DataFacts) -> Finding | None:
    code = WALK + "    ImageOps.exif_transpose(Image.open(root / name)).save(target)"
    return named(
        facts,
        "exif-orientation",
        "picture",
        "is turned by its EXIF tag alone|are turned by their EXIF tags alone",
        ("Write copies with turned pixels.", code),
    )


@rule(
    code="data/wrong-image-size",
    title="A picture has another size than the others.",
    symptom="stack expects each tensor to be equal size, in some batches; never with a batch of one.",
    cause="Tiles at the edge, pictures from another source, or a resize that keeps the shape.",
    confirm="Count `Image.open(path).size` over the set.",
    fix="Resize or crop in the transform, or write copies of the right size.",
    reference="https://docs.pytorch.org/vision/stable/transforms.html",
)
def wrong_image_size(facts: DataFacts) -> Finding | None:
    size = facts.expected.get("size", "(width, height)")
    code = WALK + f"    ImageOps.fit(Image.open(root / name), {size}).save(target)"
    return named(
        facts,
        "wrong-image-size",
        "picture",
        "has another size|have another size",
        ("Write copies of the right size (cut at the edges).", code),
    )


@rule(
    code="data/image-too-small",
    title="A picture is smaller than the crop or the model needs.",
    symptom="Required crop size is larger than the input; an empty range in a random crop; blurred samples.",
    cause="Thumbnails among photographs.",
    confirm="The smallest of `min(Image.open(path).size)`.",
    fix="Leave them out. Enlarging makes them fit, and blurred.",
    reference="https://docs.pytorch.org/vision/stable/generated/torchvision.transforms.RandomCrop.html",
)
def image_too_small(facts: DataFacts) -> Finding | None:
    return named(facts, "image-too-small", "picture", "is too small|are too small")


@rule(
    code="data/wrong-image-mode",
    title="A picture has another mode (channels, depth) than it should.",
    symptom="Expected input to have 3 channels, but got 4 (or 1), in some batches.",
    cause="An alpha channel, a palette, greyscale, CMYK or 16 bits: viewers show all of them alike.",
    confirm="Count `Image.open(path).mode` over the set.",
    fix="`.convert('RGB')` in the loader; a picture with a transparent ground needs one to be laid on.",
    reference="https://pillow.readthedocs.io/en/stable/handbook/concepts.html#modes",
)
def wrong_image_mode(facts: DataFacts) -> Finding | None:
    mode = facts.expected.get("mode", "RGB")
    code = WALK + f"    Image.open(root / name).convert({mode!r}).save(target)"
    return named(
        facts, "wrong-image-mode", "picture", "has another mode|have another mode", (f"Write copies in {mode}.", code)
    )


@rule(
    code="data/mask-size-mismatch",
    title="A mask has another size than its picture.",
    symptom="The target size must be the same as the input size; or the loss stays high at edges.",
    cause="Pictures were resized and masks not, or width and height were exchanged.",
    confirm="Compare `.size` of both files.",
    fix="Make the mask again; resize masks with NEAREST, so that no new classes come up.",
    reference="https://pillow.readthedocs.io/en/stable/handbook/concepts.html#filters",
)
def mask_size_mismatch(facts: DataFacts) -> Finding | None:
    code = "mask = mask.resize(image.size, Image.NEAREST)  # NEAREST: no value in between"
    return named(
        facts,
        "mask-size-mismatch",
        "mask",
        "has another size than its picture|have another size than their pictures",
        ("Resize the mask to its picture, if it shows the same part of it.", code),
    )


@rule(
    code="data/caption-encoding",
    title="A caption is not UTF-8.",
    symptom="UnicodeDecodeError: 'utf-8' codec can't decode byte 0x92, at another step each time.",
    cause="An editor on Windows saved it as Windows-1252 or UTF-16; typographic quotes and accents differ there.",
    confirm="`path.read_bytes().decode('utf-8')`.",
    fix="Write copies in UTF-8.",
    reference="https://docs.python.org/3/howto/unicode.html",
)
def caption_encoding(facts: DataFacts) -> Finding | None:
    ending = facts.expected.get("caption_extension", ".txt")
    code = (
        f"import pathlib\nroot, copies = pathlib.Path(ROOT), pathlib.Path(ROOT + '_mended')\nfor name in BAD:\n"
        f"    caption = (root / name).with_suffix({ending!r})\n    data, target = caption.read_bytes(), copies / caption.relative_to(root)\n"
        "    coding = 'utf-16' if data[:2] in (b'\\xff\\xfe', b'\\xfe\\xff') else 'cp1252'\n"
        "    target.parent.mkdir(parents=True, exist_ok=True)\n    target.write_text(data.decode(coding), encoding='utf-8')"
    )
    return named(
        facts,
        "caption-encoding",
        "caption",
        "is not UTF-8|are not UTF-8",
        ("Write copies in UTF-8, and read them.", code),
    )


@rule(
    code="data/caption-missing",
    title="A picture has no caption.",
    symptom="The adapter learns the look of the set and does not follow the prompt; no error.",
    cause="A trainer takes an empty prompt where no file stands beside the picture: it has another name, or ending.",
    confirm="For each picture, look for the file of the same name.",
    fix="Write the captions, or leave the pictures out.",
    reference="https://github.com/kohya-ss/sd-scripts/blob/main/docs/config_README-en.md",
)
def caption_missing(facts: DataFacts) -> Finding | None:
    return named(facts, "caption-missing", "picture", "has no caption|have no caption")


@rule(
    code="data/caption-empty",
    title="A caption is empty.",
    symptom="The model drifts towards the set even with an empty prompt.",
    cause="The tagger failed on the picture, and its file was written all the same.",
    confirm="`path.read_text().strip()`.",
    fix="Write the captions, or leave the pictures out.",
    reference="https://github.com/kohya-ss/sd-scripts/blob/main/docs/config_README-en.md",
)
def caption_empty(facts: DataFacts) -> Finding | None:
    return named(facts, "caption-empty", "caption", "is empty|are empty")


@rule(
    code="data/trigger-missing",
    title="A caption lacks the trigger word.",
    symptom="The trained adapter hardly reacts to its trigger.",
    cause="The word was put in front of the captions once, and later ones were written without it.",
    confirm="Look for the word in each caption, anywhere: shuffled captions have it elsewhere than in front.",
    fix="Write copies of the captions with the word.",
    reference="https://huggingface.co/docs/diffusers/training/lora",
)
def trigger_missing(facts: DataFacts) -> Finding | None:
    trigger, ending = facts.expected.get("trigger", "trigger"), facts.expected.get("caption_extension", ".txt")
    code = (
        "import pathlib\nroot, copies = pathlib.Path(ROOT), pathlib.Path(ROOT + '_mended')\nfor name in BAD:\n"
        f"    caption = (root / name).with_suffix({ending!r})\n    target = copies / caption.relative_to(root)\n"
        "    target.parent.mkdir(parents=True, exist_ok=True)\n"
        f"    target.write_text({trigger + ', '!r} + caption.read_text(encoding='utf-8'), encoding='utf-8')"
    )
    return named(
        facts,
        "trigger-missing",
        "caption",
        "lacks the trigger|lack the trigger",
        ("Write copies with the word in front.", code),
    )


@rule(
    code="data/caption-too-short",
    title="A caption has too few words.",
    symptom="Prompts are followed for a part of the set only.",
    cause="A file name or a single tag stands in place of a sentence.",
    confirm="Count the words; in Chinese, Japanese and Thai each character is one.",
    fix="Write them anew.",
    reference="https://huggingface.co/docs/diffusers/training/text2image",
)
def caption_too_short(facts: DataFacts) -> Finding | None:
    return named(facts, "caption-too-short", "caption", "has too few words|have too few words")


@rule(
    code="data/color-shift",
    title="The pictures of one folder have other colours than those of all others.",
    symptom="Validation is worse than it should be, or samples have a tint.",
    cause="Red and blue were exchanged (OpenCV reads BGR), or a set was normalised or exported in another way.",
    confirm="Look at pictures of both; compare mean red, green and blue by folder.",
    fix="Convert the folder again, from its source.",
    reference="https://docs.opencv.org/4.x/d8/d01/group__imgproc__color__conversions.html",
)
def color_shift(facts: DataFacts) -> Finding | None:
    code = "import numpy\nimage = Image.fromarray(numpy.asarray(image)[..., ::-1])  # where red and blue were exchanged"
    return named(
        facts,
        "color-shift",
        "folder",
        "has other colours than the others|have other colours than the others",
        ("Look at both; exchange the channels if they were.", code),
    )


@rule(
    code="data/duplicate-across-splits",
    title="An item outside of the training set is in the training set, too.",
    symptom="Validation is far better than on new data.",
    cause="The set was split at random while it held items twice: under two names, saved again, mirrored.",
    confirm="Open both.",
    fix="Take the copy out of the later split. Split by source (person, video, page), not by file.",
    reference="https://scikit-learn.org/stable/common_pitfalls.html#data-leakage",
)
def duplicate_across_splits(facts: DataFacts) -> Finding | None:
    code = "bad = BAD\nvalidation = [item for item in validation if item not in bad]"
    return named(
        facts,
        "duplicate-across-splits",
        "item",
        "outside of the training set is a copy of an earlier one|outside of the training set are copies of earlier ones",
        ("Take the copies out of the later split.", code),
    )


@rule(
    code="data/conflicting-labels",
    title="The same input has two labels.",
    symptom="No model gets beyond a certain accuracy on the training set.",
    cause="Lists of classes were joined, and an item stands in two of them; or several people labelled it.",
    confirm="Group the rows by their input and count the labels.",
    fix="Decide for one label, or make it a task of several labels.",
    reference="https://docs.cleanlab.ai/stable/cleanlab/datalab/guide/issue_type_description.html",
)
def conflicting_labels(facts: DataFacts) -> Finding | None:
    return named(
        facts,
        "conflicting-labels",
        "item",
        "shares its input with one of another label|share their input with one of another label",
        ("Decide for one label; until then leave them out.", ROWS[1]),
    )


@rule(
    code="data/target-leakage",
    title="A column gives the label away.",
    symptom="Nearly no error from the first epochs on, and none of it on new data.",
    cause="The column is made from the label, or is written when the outcome is known.",
    confirm="Predict the label from this column alone.",
    fix="Take the column out of the features.",
    reference="https://scikit-learn.org/stable/common_pitfalls.html#data-leakage",
)
def target_leakage(facts: DataFacts) -> Finding | None:
    return named(facts, "target-leakage", "column", "gives the label away|give the label away", COLUMNS)


COLUMNS = (
    "Take the column out of the features.",
    "bad = {str(item).rpartition('#')[2] for item in BAD}\ncolumns = [column for column in columns if column not in bad]",
)


@rule(
    code="data/index-column",
    title="The number of the row is among the features.",
    symptom="Good scores that fall when the rows are shuffled; a column `Unnamed: 0`.",
    cause="`to_csv` writes the index as a column, and `read_csv` reads it as data.",
    confirm="The column counts up by one.",
    fix="Write with `index=False`, or read with `index_col=0`.",
    reference="https://pandas.pydata.org/docs/reference/api/pandas.DataFrame.to_csv.html",
)
def index_column(facts: DataFacts) -> Finding | None:
    return named(facts, "index-column", "column", "counts the rows|count the rows", COLUMNS)


@rule(
    code="data/non-numeric",
    title="Text stands in a column of numbers.",
    symptom="could not convert string to float; or the whole column becomes text, and is taken for categories.",
    cause="Units, signs of thousands, decimal commas, question marks for missing values.",
    confirm="`pandas.to_numeric(column, errors='coerce')` gives NaN there.",
    fix="Mend the texts, or read them as missing: `na_values`.",
    reference="https://pandas.pydata.org/docs/reference/api/pandas.to_numeric.html",
)
def non_numeric(facts: DataFacts) -> Finding | None:
    code = "table[columns] = table[columns].apply(pandas.to_numeric, errors='coerce')\ntable = table.dropna(subset=columns)"
    return named(
        facts,
        "non-numeric",
        "item",
        "holds text in place of a number|hold text in place of numbers",
        ("Read them as numbers, and leave out what is none.", code),
    )


@rule(
    code="data/nonfinite-values",
    title="A value is missing, NaN or infinite.",
    symptom="The loss is nan, in some batches or from the first one on.",
    cause="An empty cell, a division by zero in the preparation, a number beyond float32.",
    confirm="`torch.isfinite(x).all()` for each batch.",
    fix="Fill or leave out these rows.",
    reference="https://pandas.pydata.org/docs/user_guide/missing_data.html",
)
def nonfinite_values(facts: DataFacts) -> Finding | None:
    return named(
        facts,
        "nonfinite-values",
        "item",
        "has a value that is missing or not finite|have values that are missing or not finite",
        ROWS,
    )


@rule(
    code="data/label-out-of-range",
    title="A label is no class.",
    symptom="Target is out of bounds on the CPU, an assertion on a card.",
    cause="Labels count from 1, a class was added, or a value stands for something else (255 in masks).",
    confirm="Smallest and largest label beside the outputs of the last layer.",
    fix="Map the labels to 0 … classes - 1, or pass `ignore_index` to the loss.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
)
def label_out_of_range(facts: DataFacts) -> Finding | None:
    code = "classes = sorted(set(labels))\nlabels = [classes.index(label) for label in labels]"
    return named(
        facts,
        "label-out-of-range",
        "item",
        "has a label that is no class|have labels that are no class",
        ("Map the labels to 0 … classes - 1.", code),
    )


@rule(
    code="data/invalid-box",
    title="A box has no area, or lies beyond the picture.",
    symptom="All bounding boxes should have positive height and width; or the detector's loss is nan.",
    cause="Boxes were scaled and rounded, corners exchanged, or x, y, width, height taken for two corners.",
    confirm="0 <= x1 < x2 <= width, and the same for y.",
    fix="Leave these boxes out, or mend them in the tool that made them.",
    reference="https://docs.pytorch.org/vision/stable/models/faster_rcnn.html",
)
def invalid_box(facts: DataFacts) -> Finding | None:
    return named(facts, "invalid-box", "row", "has a box that is none|have boxes that are none", ROWS)


@rule(
    code="data/file-missing",
    title="A row names a file that is not there.",
    symptom="FileNotFoundError in the middle of an epoch.",
    cause="The files were moved or renamed, or a copy stopped.",
    confirm="`os.path.exists` for each row.",
    fix="Fetch the files, or leave the rows out.",
    reference="https://docs.python.org/3/library/os.path.html#os.path.exists",
)
def file_missing(facts: DataFacts) -> Finding | None:
    return named(facts, "file-missing", "row", "names a file that is not there|name files that are not there", ROWS)


@rule(
    code="data/empty-text",
    title="A text is empty.",
    symptom="A length of zero is refused, or a mean over no words is nan.",
    cause="Empty lines of the source became rows.",
    confirm="`text.strip()` for each row.",
    fix="Leave these rows out.",
    reference="https://pandas.pydata.org/docs/reference/api/pandas.Series.str.strip.html",
)
def empty_text(facts: DataFacts) -> Finding | None:
    return named(facts, "empty-text", "row", "has no text|have no text", ROWS)


@rule(
    code="data/corrupt-audio",
    title="A sound does not open, or ends early.",
    symptom="LibsndfileError, EOFError or a short batch, in the middle of an epoch.",
    cause="A download or a recording stopped; the head promises more than there is.",
    confirm="`soundfile.read(path)`, and its length beside `soundfile.info(path).frames`.",
    fix="Fetch it again, or leave it out.",
    reference="https://python-soundfile.readthedocs.io",
)
def corrupt_audio(facts: DataFacts) -> Finding | None:
    return named(facts, "corrupt-audio", "sound", "does not open, or ends early|do not open, or end early")


@rule(
    code="data/wrong-sample-rate",
    title="A sound has another sample rate.",
    symptom="Speech is too fast or too deep for the model; alignment stays blurred. It plays well in any player.",
    cause="Recordings of several sources; the loader does not resample.",
    confirm="`soundfile.info(path).samplerate`.",
    fix="Resample in the loader, or write copies.",
    reference="https://docs.pytorch.org/audio/stable/generated/torchaudio.functional.resample.html",
)
def wrong_sample_rate(facts: DataFacts) -> Finding | None:
    rate = facts.expected.get("sample_rate", "rate")
    code = f"waveform, own = torchaudio.load(path)\nwaveform = torchaudio.functional.resample(waveform, own, {rate})"
    return named(
        facts,
        "wrong-sample-rate",
        "sound",
        "has another sample rate|have another sample rate",
        ("Resample them in the loader.", code),
    )


@rule(
    code="data/wrong-channels",
    title="A sound (or a picture as an array) has another number of channels.",
    symptom="Shapes do not match in some batches, or left and right are taken for two samples.",
    cause="Stereo recordings among mono ones.",
    confirm="`soundfile.info(path).channels`.",
    fix="Average the channels in the loader, or write copies.",
    reference="https://python-soundfile.readthedocs.io",
)
def wrong_channels(facts: DataFacts) -> Finding | None:
    code = "waveform = waveform.mean(0, keepdim=True)  # one channel of all"
    return named(
        facts,
        "wrong-channels",
        "item",
        "has another number of channels|have another number of channels",
        ("Average them in the loader.", code),
    )


@rule(
    code="data/silent-audio",
    title="A sound is all zero.",
    symptom="The loss is nan in the batches that hold it, where features are scaled by their deviation.",
    cause="A muted microphone, or a conversion that failed.",
    confirm="`soundfile.read(path)[0].any()`.",
    fix="Leave it out.",
    reference="https://python-soundfile.readthedocs.io",
)
def silent_audio(facts: DataFacts) -> Finding | None:
    return named(facts, "silent-audio", "sound", "is silent|are silent")


@rule(
    code="data/clipped-audio",
    title="A sound is clipped: its peaks are flat at full scale.",
    symptom="Buzzing output; the quality of these samples stays poor.",
    cause="It was recorded or amplified too loud. What was above full scale is lost.",
    confirm="Runs of equal samples at the highest value.",
    fix="Record or convert it again, more softly; or leave it out.",
    reference="https://python-soundfile.readthedocs.io",
)
def clipped_audio(facts: DataFacts) -> Finding | None:
    return named(facts, "clipped-audio", "sound", "is clipped|are clipped")


@rule(
    code="data/token-out-of-vocabulary",
    title="A token is beyond the vocabulary.",
    symptom="index out of range in self, on the CPU; a device-side assertion on a card.",
    cause="Tokens were added to the tokenizer and the model's embedding was not enlarged; or the ids are another's.",
    confirm="The largest id beside `model.get_input_embeddings().num_embeddings`.",
    fix="`model.resize_token_embeddings(len(tokenizer))`.",
    reference="https://huggingface.co/docs/transformers/main_classes/model",
)
def token_out_of_vocabulary(facts: DataFacts) -> Finding | None:
    code = "model.resize_token_embeddings(len(tokenizer))"
    return named(
        facts,
        "token-out-of-vocabulary",
        "row",
        "holds a token beyond the vocabulary|hold tokens beyond the vocabulary",
        ("Enlarge the embedding.", code),
    )


@rule(
    code="data/all-padding",
    title="A row holds padding alone.",
    symptom="The loss or an attention is nan about once in an epoch.",
    cause="An empty line was tokenized.",
    confirm="Count the tokens that are no padding, by row.",
    fix="Leave empty texts out before tokenizing.",
    reference="https://huggingface.co/docs/transformers/pad_truncation",
)
def all_padding(facts: DataFacts) -> Finding | None:
    return named(facts, "all-padding", "row", "holds no token but padding|hold no token but padding", BY_INDEX)


BY_INDEX = (
    "Leave these rows out.",
    "bad = BAD\ndataset = torch.utils.data.Subset(dataset, [i for i in range(len(dataset)) if i not in bad])",
)


@rule(
    code="data/labels-misaligned",
    title="A row has more or fewer labels than tokens.",
    symptom="Expected input batch_size to match target batch_size; or labels are shifted against their words.",
    cause="Words were split into several tokens, and special tokens added, after labelling.",
    confirm="`len(row['labels'])` beside `len(row['input_ids'])`.",
    fix="Spread the labels with `tokenizer(...).word_ids()`, and -100 for special tokens.",
    reference="https://huggingface.co/docs/transformers/tasks/token_classification",
)
def labels_misaligned(facts: DataFacts) -> Finding | None:
    code = "labels = [-100 if word is None else word_labels[word] for word in encoding.word_ids()]"
    return named(
        facts,
        "labels-misaligned",
        "row",
        "has not as many labels as tokens|have not as many labels as tokens",
        ("Spread the labels over the tokens of each word.", code),
    )


@rule(
    code="data/sequence-too-long",
    title="A row is longer than the model has positions.",
    symptom="index out of range in self, in the embedding of positions; or the end is cut in silence.",
    cause="Truncation was not asked for, or to another length than the model's.",
    confirm="`max(len(row['input_ids']) for row in dataset)` beside `max_position_embeddings`.",
    fix="`tokenizer(text, truncation=True, max_length=...)`.",
    reference="https://huggingface.co/docs/transformers/pad_truncation",
)
def sequence_too_long(facts: DataFacts) -> Finding | None:
    code = f"encoding = tokenizer(text, truncation=True, max_length={facts.expected.get('max_length', 'length')})"
    return named(
        facts,
        "sequence-too-long",
        "row",
        "is longer than the model has positions|are longer than the model has positions",
        ("Cut them when they are tokenized.", code),
    )


@rule(
    code="data/eos-missing",
    title="A row lacks its end token.",
    symptom="Generation does not stop.",
    cause="The tokenizer does not add it by itself, or a part of the set was prepared without it.",
    confirm="The last token that is no padding, by row.",
    fix="Append `tokenizer.eos_token` before padding.",
    reference="https://huggingface.co/docs/transformers/main_classes/tokenizer",
)
def eos_missing(facts: DataFacts) -> Finding | None:
    code = "ids = tokenizer(text)['input_ids'] + [tokenizer.eos_token_id]"
    return named(
        facts, "eos-missing", "row", "lacks its end token|lack their end tokens", ("Append it before padding.", code)
    )


@rule(
    code="data/item-fails",
    title="An item of the data set raises an error.",
    symptom="Training ends in the middle of an epoch, in a worker.",
    cause="The data set's own `__getitem__` fails on it.",
    confirm="`dataset[index]`.",
    fix="`%explain` after `dataset[index]` names the cause.",
    reference="https://docs.pytorch.org/docs/stable/data.html",
)
def item_fails(facts: DataFacts) -> Finding | None:
    problems = facts.of("data/item-fails")
    index = problems[0].item if problems else 0
    return named(
        facts,
        "item-fails",
        "item",
        "can't be made|can't be made",
        ("Look at the error by itself.", f"dataset[{index!r}]"),
    )


ORDER: tuple[Naming, ...] = (
    unread_extension,
    unreadable_file,
    oversized_file,
    unfinished_file,
    corrupt_image,
    truncated_image,
    corrupt_audio,
    item_fails,
    format_mismatch,
    exif_orientation,
    wrong_image_size,
    image_too_small,
    wrong_image_mode,
    mask_size_mismatch,
    caption_encoding,
    caption_missing,
    caption_empty,
    trigger_missing,
    caption_too_short,
    wrong_sample_rate,
    wrong_channels,
    silent_audio,
    clipped_audio,
    file_missing,
    nonfinite_values,
    non_numeric,
    token_out_of_vocabulary,
    all_padding,
    sequence_too_long,
    labels_misaligned,
    eos_missing,
    label_out_of_range,
    invalid_box,
    empty_text,
    conflicting_labels,
    duplicate_across_splits,
    index_column,
    target_leakage,
    color_shift,
)
"""One item has one problem: the first of these that it has."""
CODES = {f"data/{check.__name__.replace('_', '-')}": place for place, check in enumerate(ORDER)}
