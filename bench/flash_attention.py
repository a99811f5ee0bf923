"""FlashAttention's own tests, sampled, run by FlashCore.

    python3 bench/flash_attention.py FOLDER [--seconds 90] [--cases 200] [--seed 0] [--only WORDS]

FOLDER is a checkout of FlashAttention, or of it `tests/test_flash_attn.py`, `hopper/test_flash_attn.py`,
`hopper/test_util.py` and `hopper/padding.py`. pytest and einops must be installed. The tests import
`flash_attn` and `flash_attn_interface`, which are `flashcore.compat`'s here; nothing of theirs is changed.

Their grids have 700,000 cases. The seed draws some of each test, which run in turn until the time is over.
Left out are cases with dropout, and tests of what is no part of the functions (operators of their extension,
an error for lengths that a GPU would have to be asked for). Cases that the functions refuse by name are
counted.
"""

import argparse
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import flashcore.compat
import pytest
import torch

FILES = ("tests/test_flash_attn.py", "hopper/test_flash_attn.py")
# Tests whose subject lies outside of the public functions, each with that subject.
OUTSIDE = {
    "test_flash3_bw_compatibility": "schemas of their operators",
    "test_flash_attn_varlen_paged_kv_num_splits": "a function of their extension",
    "test_flash_attn_generator_arg_must_be_none": "a function of their extension",
    "test_flash_attn_kvcache_paged_block_table_bounds": "lengths on a GPU are cut to their bound, not read",
}
REFUSED = re.compile(r"^(dropout_p|qv)=.* is not supported yet")


class Sample:
    """Chooses cases, stops in time, and counts."""

    def __init__(self, seconds, cases, seed, only):
        self.end, self.cases, self.seed, self.only = time.monotonic() + seconds, cases, seed, only
        self.results, self.refused, self.failed, self.of = Counter(), Counter(), [], {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector, name, obj):
        """Puts some of its cases in the place of a test's grid, before pytest makes them all."""
        marks = getattr(obj, "pytestmark", []) if name.startswith("test_") else []
        grid = [mark.args[:2] for mark in marks if mark.name == "parametrize"]
        if not grid:
            return
        others = [mark for mark in marks if mark.name != "parametrize"]
        axes = [[word.strip() for word in names.split(",")] for names, _ in grid]
        names = [word for axis in axes for word in axis]
        draw, cases = random.Random(f"{self.seed} {collector.name} {name}"), {}
        for _ in range(4 * self.cases):
            values = []
            for axis, (_, choices) in zip(axes, grid):
                chosen = draw.choice(choices)
                values += [chosen] if len(axis) == 1 else chosen
            if len(cases) < self.cases and not dict(zip(names, values)).get("dropout_p"):
                cases.setdefault(repr(values), tuple(values))
        drawn = [values if len(names) > 1 else values[0] for values in cases.values()]
        obj.pytestmark = [*others, pytest.mark.parametrize(",".join(names), drawn).mark]

    def pytest_collection_modifyitems(self, items):
        tests = {}
        for item in items:
            name = f"{item.path.parent.name}/{item.originalname}"
            self.of[item.nodeid] = name
            if item.originalname not in OUTSIDE and self.only in name:
                tests.setdefault(name, []).append(item)
        most = max(map(len, tests.values()), default=0)
        items[:] = [found[at] for at in range(most) for found in tests.values() if at < len(found)]

    def pytest_collectreport(self, report):
        if report.failed:
            print(report.longreprtext)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        if time.monotonic() > self.end:
            item.session.shouldstop = "the time is over"
            pytest.skip("the time is over")
        try:
            return (yield)
        except NotImplementedError as error:
            found = REFUSED.match(str(error))
            if found is None:
                raise
            self.refused[f"{self.of[item.nodeid]}: {found[1]}"] += 1
            pytest.skip(str(error))

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.failed:
            self.results[self.of[report.nodeid], report.outcome] += 1
            if report.failed:
                self.failed.append(report)

    def report(self):
        for (name, outcome), count in sorted(self.results.items()):
            print(f"{name}: {count} {outcome}")
        for reason, count in self.refused.items():
            print(f"refused by name: {reason}, {count}")
        for report in self.failed:
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            print(report.nodeid, *lines[:3], sep="\n    ")
        outcomes = Counter()
        for (_, outcome), count in self.results.items():
            outcomes[outcome] += count
        print(f"{outcomes['passed']} passed, {outcomes['failed']} failed, {outcomes['skipped']} skipped")
        return outcomes["failed"] == 0 and outcomes["passed"] > 0


def prepare(folder):
    """Puts our modules where the tests look for FlashAttention's, and theirs where they want helpers."""
    flashcore.compat.install("flash_attn", "flash_attn_interface")
    ours = sys.modules["flash_attn.flash_attn_interface"]
    ours.USE_TRITON_ROCM = False
    # For the layout of dropout's mask.
    ours._get_block_size_n = lambda *_: 128
    sys.path.insert(0, str(folder / "hopper"))


def on_cpu(folder):
    """A copy of the tests whose tensors are on the CPU, for a machine without a GPU."""
    copy = Path(tempfile.mkdtemp())
    for name in (*FILES, "hopper/padding.py", "hopper/test_util.py"):
        text = (folder / name).read_text().replace('"cuda"', '"cpu"')
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(text)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.synchronize = lambda *_: None
    return copy


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--cases", type=int, default=200, help="of each test at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="tests whose names have this in them")
    options = parser.parse_args()
    folder = options.folder.resolve()
    sample = Sample(options.seconds, options.cases, options.seed, options.only)
    prepare(folder)
    tests = on_cpu(folder) if options.device == "cpu" else folder
    files = [str(tests / name) for name in FILES if (tests / name).exists()]
    quiet = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", "--import-mode=importlib"]
    pytest.main([*quiet, "--rootdir", str(tests), "-c", "/dev/null", "--tb=short", *files], plugins=[sample])
    sys.exit(0 if sample.report() else 1)


if __name__ == "__main__":
    main()
