"""Clicks to a server that finds the best of all items for a user, by the command line.

Users of a kind click items of their kind. Run: python examples/two_towers.py FOLDER
"""

import json
import random
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

SCHEMA = """
label = "click"
[categorical.user]
min_count = 1
[categorical.item]
min_count = 1
"""
RECIPE = """
[model]
name = "two_tower"
item_features = ["item"]
top = [32]
normalize = true
temperature = 0.1
[loss]
name = "in_batch_softmax"
[optimizer]
name = "adam"
lr = 0.01
[embedding.optimizer]
name = "adam"
lr = 0.01
[train]
epochs = 3
batch_size = 500
monitor = "logloss"
"""
NUM_USERS = 100
NUM_ITEMS = 50
NUM_KINDS = 5
PIBROCH = (sys.executable, "-m", "pibroch")


def write_inputs(folder: Path) -> None:
    """Clicks, of which each user's and its item's number have one remainder, and all items."""
    draw = random.Random(1)
    users = [draw.randrange(NUM_USERS) for _ in range(10_000)]
    items = [
        user % NUM_KINDS + NUM_KINDS * draw.randrange(NUM_ITEMS // NUM_KINDS) for user in users
    ]
    lines = [f"1,u{user},i{item}" for user, item in zip(users, items, strict=True)]
    (folder / "clicks.csv").write_text("\n".join(["click,user,item", *lines]) + "\n")
    (folder / "items.csv").write_text("\n".join(["item", *(f"i{n}" for n in range(NUM_ITEMS))]))
    (folder / "schema.toml").write_text(SCHEMA)
    (folder / "recipe.toml").write_text(RECIPE)


def run(folder: Path, *arguments: str) -> None:
    """A command of pibroch in the folder."""
    subprocess.run([*PIBROCH, *arguments], cwd=folder, check=True)


def main(folder: Path) -> float:
    """The share of retrieved items that are of their user's kind."""
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(folder)
    prepare = ("data", "prepare", "csv", "clicks.csv", "--schema", "schema.toml", "--out", "data")
    run(folder, *prepare)
    run(folder, "train", "recipe.toml", "--data", "data", "--run-dir", "run")
    run(folder, "evaluate", "--checkpoint", "run", "--data", "data", "--json")
    run(folder, "export", "run", "--out", "export")
    serve = (*PIBROCH, "serve", "export", "--items", "items.csv", "--port", "0")
    with subprocess.Popen(serve, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]  # it is said once requests are answered
        rows = [{"user": f"u{number}"} for number in range(NUM_USERS)]
        body = json.dumps({"rows": rows, "k": 5}).encode()
        with urlopen(Request(f"{url}/retrieve", body)) as answer:
            items = json.load(answer)["items"]
        server.terminate()
    kinds = [[int(item[1:]) % NUM_KINDS for item in row] for row in items]
    right = [kind == user % NUM_KINDS for user, row in enumerate(kinds) for kind in row]
    return sum(right) / len(right)


if __name__ == "__main__":
    print(f"of the user's kind: {main(Path(sys.argv[1])):.3f}")
