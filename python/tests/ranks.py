"""Ranks for tests: processes with gloo, and threads of one process that hand tensors to each other."""

import multiprocessing
import os
import queue
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def begin(store, rank, size, timeout=300):
    """Joins a group of processes, which meet at a file."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )


def _process(work, store, rank, size, answers, arguments):
    # There are more processes than cores.
    torch.set_num_threads(1)
    os.environ["RAYON_NUM_THREADS"] = "1"
    try:
        answer = work(store, rank, size, *arguments)
    except Exception:
        answer = traceback.format_exc()
    answers.put((rank, answer))


def processes(work, size, *arguments, expected=None, timeout=600):
    """Runs ``work(store, rank, size, *arguments)`` in so many processes; what they answer, by rank. Those
    that are not expected to answer may end as they like."""
    context = multiprocessing.get_context("forkserver")
    # Importing costs more than the tests do: once, and the processes are copies of that one.
    context.set_forkserver_preload(["torch", "torch.distributed", "flashcore.distributed"])
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        started = [
            context.Process(target=_process, args=(work, store, rank, size, answers, arguments), daemon=True)
            for rank in range(size)
        ]
        for process in started:
            process.start()
        found, ends = {}, time.monotonic() + timeout
        expected = range(size) if expected is None else expected
        try:
            while not set(expected) <= set(found):
                try:
                    rank, answer = answers.get(timeout=1)
                    found[rank] = answer
                except queue.Empty:
                    lost = [it for it in expected if it not in found and not started[it].is_alive()]
                    assert not lost, f"processes {lost} ended without an answer"
                    assert time.monotonic() < ends, f"no answer from {set(expected) - set(found)}"
            for rank in expected:
                started[rank].join(30)
                assert started[rank].exitcode == 0, f"process {rank} ended with {started[rank].exitcode}"
        finally:
            for process in started:
                if process.is_alive():
                    process.kill()
                process.join()
    return found


class Done:
    """What is under way between threads."""

    def __init__(self, finish):
        self._finish = finish

    def wait(self):
        self._finish()


class Mailbox:
    """Where threads leave tensors for each other."""

    def __init__(self, size):
        self.size = size
        self.letters = {}
        self.there = threading.Condition()
        self.lost = None

    def put(self, key, tensor):
        event = None
        if tensor.is_cuda:
            event = torch.cuda.Event()
            event.record()
        with self.there:
            self.letters[key] = tensor, event
            self.there.notify_all()

    def take(self, key):
        with self.there:
            self.there.wait_for(lambda: key in self.letters or self.lost, timeout=300)
            if key not in self.letters:
                raise RuntimeError(f"nothing came from rank {key[0]}: {self.lost}")
            tensor, event = self.letters.pop(key)
        if event is not None:
            event.wait()
        return tensor


class Thread:
    """A rank that is a thread: what a process group does for the package, within one process and on one
    device."""

    def __init__(self, mailbox, rank):
        self.mailbox, self.rank, self.size = mailbox, rank, mailbox.size
        self.sent = self.received = 0
        self.sent_bytes = 0

    def exchange(self, sends, receives):
        for to, tensor in sends:
            self.mailbox.put((self.rank, to, "message", self._count((to, "sent"))), tensor)
            self.sent_bytes += tensor.numel() * tensor.element_size()
        keys = [((rank, self.rank, "message", self._count((rank, "received"))), tensor) for rank, tensor in receives]

        def finish():
            for key, tensor in keys:
                given = self.mailbox.take(key)
                assert given.shape == tensor.shape, f"{key}: {given.shape} was sent, {tensor.shape} expected"
                tensor.copy_(given)

        return [Done(finish)]

    def all_gather(self, into, part):
        parts = into.view(self.size, -1)
        others = [rank for rank in range(self.size) if rank != self.rank]
        parts[self.rank] = part
        return self.exchange([(rank, part) for rank in others], [(rank, parts[rank]) for rank in others])

    def _count(self, key):
        counts = self.__dict__.setdefault("_counts", {})
        counts[key] = counts.get(key, 0) + 1
        return counts[key]


def threads(work, size):
    """Runs ``work(rank)``, with a transport, in so many threads; what they answer, by rank."""
    mailbox = Mailbox(size)
    answers, errors = [None] * size, []

    def run(rank):
        try:
            answers[rank] = work(Thread(mailbox, rank))
        except Exception as error:
            errors.append(error)
            with mailbox.there:
                mailbox.lost = f"rank {rank} raised {error!r}"
                mailbox.there.notify_all()

    started = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    return answers
