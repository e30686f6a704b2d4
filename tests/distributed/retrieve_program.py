"""A program of one's own that looks rows of other hosts up, without end and without collectives.

The tests stop a process of it, or pull a host from the net.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

import pibroch as pb

ROWS = 10_000


def main() -> None:
    dist.init_process_group("gloo")
    embeddings = pb.Embeddings(
        [pb.Table("a", ROWS, 16)], pb.SGD(lr=1.0), exchange="retrieve", seed=1
    )
    ids, nothing = torch.arange(64)[None], torch.empty(64, 0)
    sys.stdout.write(f"running {os.getpid()}\n")
    sys.stdout.flush()
    step = 0
    try:
        with torch.no_grad():
            while True:
                step += 1
                embeddings(
                    pb.JaggedBatch.from_one_hot(nothing, ["a"], ids * step % ROWS, torch.empty(64))
                )
    except pb.errors.RankFailedError as error:
        sys.stdout.write(f"named {error.rank}: {error}\n")
        sys.stdout.flush()
        time.sleep(float(os.environ.get("LINGER_S", "0")))
        os._exit(3)


if __name__ == "__main__":
    main()
