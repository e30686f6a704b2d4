"""Opens mutated copies of a folder, each in words refused or giving the scores of the original.

Run as a child process.

``python mutated_folders.py KIND FOLDER FIRST STOP`` prints a line for each mutation before and
after it, so that whoever started it knows which one it was that ended or hung it. The line after
says ``same``, ``other`` (finite scores that are not the original's, where a checksum was made to
fit) or ``refused``; anything else is a fault.
"""

import hashlib
import json
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np

MANIFESTS = ("export.json", "delta.json", "manifest.json")
ODD: list = [
    None,
    True,
    -1,
    0,
    1,
    7,
    2**31,
    2**63,
    10**40,
    1e999,
    float("nan"),
    "",
    "x",
    "../../../../etc/passwd",
    "/dev/zero",
    [],
    {},
    [[]],
    {"a": 1},
    ["x"] * 40,
    [0, -1],
    "F64",
    "I8",
]
MEMORY_BYTES = 12 << 30


def places(content, path=()):
    """Of all values in nested plain ones."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def change_json(content, draw):
    *path, key = draw.choice(list(places(content)))
    for step in path:
        content = content[step]
    what = draw.randrange(5)
    if what == 0:
        del content[key]
    elif what == 1 and isinstance(content[key], int):
        content[key] += draw.choice([-1, 1, 2, 8, -content[key] - 3, 2**40])
    elif what == 2 and isinstance(content, dict):
        content[draw.choice(["x", "format", key * 2, "schema"])] = content[key]
    elif what == 3:
        deep = content[key]
        for _ in range(draw.choice([1, 90, 400])):
            deep = [deep]
        content[key] = deep
    else:
        content[key] = draw.choice(ODD)


def change_header(path, draw):
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    if draw.random() < 0.2:
        path.write_bytes(struct.pack("<Q", draw.choice([0, 1, size + 8, 2**40, 2**63])) + data[8:])
        return
    header = json.loads(data[8 : 8 + size])
    change_json(header, draw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def change_bytes(path, draw):
    data = bytearray(path.read_bytes())
    what = draw.randrange(4)
    if what == 0:
        del data[draw.randrange(len(data) + 1) :]
    elif what == 1:
        data += draw.randbytes(draw.randrange(1, 64))
    else:
        for _ in range(draw.randrange(1, 9)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    path.write_bytes(data)


def change_kind(path, draw):
    path.unlink()
    what = draw.randrange(5)
    if what == 0:
        os.mkfifo(path)
    elif what == 1:
        path.symlink_to("/dev/zero")
    elif what == 2:
        path.symlink_to("/etc/passwd")
    elif what == 3:
        path.mkdir()


def fit(folder):
    """Make all checksums those of what is there."""
    from pibroch.untrusted import checksum

    for name in MANIFESTS:
        if (folder / name).is_file():
            try:
                content = json.loads((folder / name).read_text())
                for file in content["files"]:
                    data = (folder / file).read_bytes()
                    digest = hashlib.sha256(data).hexdigest()
                    content["files"][file] = {"size_bytes": len(data), "sha256": digest}
                content.pop("sha256", None)
                content["sha256"] = checksum(content)
                (folder / name).write_text(json.dumps(content))
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                pass
    for rows in folder.glob("*.rows"):
        plan = rows.with_suffix("")
        try:
            content = json.loads(plan.read_text())
            digest = hashlib.sha256(rows.read_bytes()).hexdigest()
            content["rows"] = {"size_bytes": rows.stat().st_size, "sha256": digest}
            content.pop("sha256", None)
            plan.write_text(json.dumps(content))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass


def mutate(folder, draw):
    """Change one file of a folder; whether checksums were made to fit."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    small = [path for path in files if path.suffix != ".safetensors"]
    path = draw.choice(draw.choice([files, small]))
    fits = draw.random() < 0.7
    if draw.random() < 0.1:
        change_kind(path, draw)
        return False
    if path.suffix in (".safetensors", ".rows"):
        draw.choice([change_header, change_header, change_bytes])(path, draw)
    elif draw.random() < 0.8:
        content = json.loads(path.read_text())
        for _ in range(draw.choice([1, 1, 3])):
            if content:
                change_json(content, draw)
        path.write_text(json.dumps(content))
    else:
        change_bytes(path, draw)
    if fits:
        fit(folder)
    return fits


def outcome_of(kind, folder):
    """Numbers that a folder of a kind gives."""
    import torch

    import pibroch as pb

    if kind == "plan":
        tables = [pb.Table("a", 9, 4), pb.Table("b", 40, 4)]
        plan = pb.Plan.load(folder / "plan")
        plan.check(tables)
        return np.concatenate(
            [  # each row has one home, or is on all shards
                np.sort(
                    np.concatenate(
                        [
                            np.asarray([*piece.rows])
                            for _, piece in [*plan.homes(table), *plan.copies(table)[:1]]
                        ]
                    )
                )
                for table in tables
            ]
        )
    if kind == "program":
        embeddings = pb.Embeddings([pb.Table("a", 9, 4)], pb.Adagrad(lr=0.1))
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        pb.load(folder, embeddings, model=model, optimizer=optimizer, scheduler=scheduler)
        torch.rand(2000)  # from the state that was loaded
        state = {**embeddings.full_state_dict(), **model.state_dict()}
        return torch.cat([tensor.flatten() for tensor in state.values()]).numpy()
    path = folder / "2" if kind == "delta" else folder
    predictor = pb.Predictor.open(path)
    values = [None, *map(str, range(40))]
    return predictor.score_raw(dict.fromkeys(predictor.columns, values)).numpy()


def main(kind, source, first, stop):
    from pibroch.errors import PibrochError

    expected = outcome_of(kind, Path(source))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for number in range(first, stop):
        draw = random.Random(f"{kind} {number}")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(shutil.copytree(source, Path(temporary) / "copy"))
            fits = mutate(folder / "2" if kind == "delta" else folder, draw)
            print(number, "begins", flush=True)
            try:
                outcome = outcome_of(kind, folder)
            except PibrochError as error:
                message = f"refused {type(error).__name__}: {error}"
            except Exception as error:
                message = f"raw {type(error).__name__}: {error}"
            else:
                is_same = np.array_equal(outcome, expected)
                is_other = fits and outcome.shape == expected.shape and np.isfinite(outcome).all()
                message = "same" if is_same else "other" if is_other else "wrong"
            print(number, message.replace("\n", " ")[:600], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
