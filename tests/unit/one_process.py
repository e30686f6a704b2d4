"""Trains in one process where neither Linux nor POSIX is.

What only they have is taken away before pibroch is imported.

numpy, numba, torch and polars come first, as they are: they have builds of their own for other
systems. Run by test_portability.py as a program of its own: ``one_process.py embeddings``, or
``one_process.py run FOLDER``.
"""

import errno
import mmap
import os
import select
import signal
import socket
import sys
from pathlib import Path

import numba  # noqa: F401
import numpy  # noqa: F401
import polars  # noqa: F401
import torch
import torch.distributed

ABSENT = {
    os: (
        """
        EFD_CLOEXEC EFD_NONBLOCK MFD_CLOEXEC O_CLOEXEC O_DIRECT O_DIRECTORY O_NOATIME O_NONBLOCK
        O_PATH POSIX_FADV_DONTNEED POSIX_FADV_NORMAL POSIX_FADV_RANDOM POSIX_FADV_SEQUENTIAL
        POSIX_FADV_WILLNEED SCHED_BATCH SCHED_IDLE SCHED_OTHER chown copy_file_range eventfd
        eventfd_read eventfd_write fchmod fchown fdatasync fork forkpty getegid geteuid getgid
        getloadavg getpgid getrandom getuid getxattr killpg lockf memfd_create mkfifo nice
        pidfd_open pipe2 posix_fadvise posix_fallocate pread preadv pwrite pwritev register_at_fork
        sched_getaffinity sched_getparam sched_getscheduler sched_param sched_setaffinity
        sched_setscheduler sched_yield sendfile setns setpriority setsid setxattr splice statvfs
        sync sysconf uname unshare wait4 waitid
        """
    ),
    select: (
        "epoll kqueue poll EPOLLET EPOLLEXCLUSIVE EPOLLIN EPOLLONESHOT EPOLLOUT EPOLLRDHUP POLLIN"
        " POLLRDHUP"
    ),
    socket: (
        """
        AF_NETLINK AF_UNIX AF_VSOCK MSG_DONTWAIT MSG_ERRQUEUE MSG_MORE MSG_NOSIGNAL MSG_WAITALL
        MSG_ZEROCOPY SCM_CREDENTIALS SCM_RIGHTS SOCK_CLOEXEC SOCK_NONBLOCK SO_BUSY_POLL
        SO_INCOMING_CPU SO_PASSCRED SO_PEERCRED SO_REUSEPORT SO_ZEROCOPY TCP_CONGESTION TCP_CORK
        TCP_DEFER_ACCEPT TCP_INFO TCP_KEEPCNT TCP_KEEPIDLE TCP_KEEPINTVL TCP_NOTSENT_LOWAT
        TCP_QUICKACK TCP_USER_TIMEOUT recv_fds send_fds
        """
    ),
    signal: (
        """
        SIGALRM SIGCHLD SIGHUP SIGKILL SIGPIPE SIGPWR SIGQUIT SIGRTMAX SIGRTMIN SIGUSR1 SIGUSR2
        alarm pause pidfd_send_signal pthread_kill pthread_sigmask set_wakeup_fd setitimer
        siginterrupt sigpending sigtimedwait sigwait sigwaitinfo
        """
    ),
    mmap: " ".join(name for name in vars(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))),
}
POSIX_MODULES = ("fcntl", "resource", "pwd", "grp", "syslog", "termios", "_posixshmem")


def take_away(modules: tuple[str, ...] = ()) -> None:
    """Leave what Windows has, too, and no /proc.

    And none of these modules, where nothing stands in for them here.
    """
    for module, names in ABSENT.items():
        for name in names.split():
            vars(module).pop(name, None)
    for name in modules:
        sys.modules[name] = None  # type: ignore[assignment]
    os.environ.setdefault(
        "USERNAME", "tester"
    )  # as on Windows; without it torch asks for the user's number
    look = os.stat

    def stat(path, *args, **options):
        _refuse(path)
        return look(path, *args, **options)

    os.stat = stat
    sys.addaudithook(
        lambda event, args: (
            _refuse(args[0]) if event in ("open", "os.listdir", "os.scandir") else None
        )
    )


def _refuse(path):
    if str(path).startswith(("/proc/", "/sys/", "/dev/shm")):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def train_embeddings() -> None:
    """A model of the user's own learns, and predicts."""
    import pibroch as pb

    torch.manual_seed(0)
    embeddings = pb.Embeddings(
        [pb.Table("user", num_rows=500, dim=8), pb.Table("item", num_rows=50, dim=8)],
        optimizer=pb.Adagrad(lr=0.1, average=0.9),
        exchange="local",
    )
    dense = torch.nn.Linear(16, 1)
    losses = []
    for batch in embeddings.feed(_clicks(pb, 60)):
        logits = dense(embeddings(batch).flatten(1)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()
        with torch.no_grad():  # torch's own optimizers would import its compiler: seconds
            for parameter in dense.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), losses
    with torch.no_grad(), embeddings.averaged():
        assert embeddings.eval()(next(_clicks(pb, 1))).shape == (2048, 2, 8)


def _clicks(pb, num_batches):
    for _ in range(num_batches):
        ids = torch.stack([torch.randint(rows, (2048,)) for rows in (500, 50)])
        labels = ((ids[0] % 3) > (ids[1] % 2)).float()
        yield pb.JaggedBatch.from_one_hot(torch.zeros(2048, 0), ["user", "item"], ids, labels)


def train_run(folder: Path) -> None:
    """Generate data, ``pibroch train``, go on, ``pibroch evaluate``, predict.

    By the command line's own functions.
    """
    import typer

    import pibroch as pb
    from pibroch.cli.data import synthesize_command
    from pibroch.cli.main import app
    from pibroch.cli.train import evaluate, train

    data = folder / "data"
    run = folder / "run"
    synthesize_command(samples=3000, out=data, max_table_rows=50)
    small = [
        "model.dim=4",
        "model.bottom=[8]",
        "model.top=[8]",
        "train.batch_size=200",
        "train.average=0.9",
    ]
    saved = ["train.checkpoint_every=4", "train.full_checkpoint_every=2"]
    context = typer.Context(typer.main.get_command(app))
    train(context, "synthetic_small", data, [*small, *saved, "train.steps=8"], run)
    train(context, None, None, ["train.steps=10"], run, resume=True)
    evaluate(run, data, "test")
    predictor = pb.Predictor.open(run)
    ids = torch.zeros(len(predictor.features), 3, dtype=torch.int64)
    assert predictor(
        pb.JaggedBatch.from_one_hot(torch.zeros(3, 13), predictor.features, ids, torch.zeros(3))
    ).shape == (3,)


if __name__ == "__main__":
    if sys.argv[1] == "embeddings":
        take_away(POSIX_MODULES)
        train_embeddings()
    else:
        take_away()
        train_run(Path(sys.argv[2]))
    beyond = [name for name in ("rpc", "servers", "processors") if f"pibroch.{name}" in sys.modules]
    assert not beyond, f"one process has nobody to call, but imported {beyond}"
    print("done")
