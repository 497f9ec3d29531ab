"""Compares the times to the first token, the answers and the KV of vLLM on a GPU, with and without
the connector.

    python3 benches/gpu_vllm.py [--budget 600] [--out DIR] [--dir DIR] [ENGINE...]

Needs a vLLM with CUDA, a wheel of this project, and the folder `benches`. Each engine runs in its
own process, with a model of random weights in the shape of Llama-3-8B with a vocabulary of 32,000
(15 GB, in /dev/shm if it has room for four times its size, else in `--dir`). The rows of an engine
are written to `OUT/gpu-vllm.json` when it ends, and an engine is skipped if the file has its rows:
after an interruption, run the same command again. An engine is stopped when the budget of seconds
is spent. The tables are in `OUT/gpu-vllm.md`, the logs of engines in `OUT/ENGINE.log`.

Engines:

    none           no connector
    offloading     vLLM's `OffloadingConnector`, in host memory
    tier           `RitornelloConnector` with vLLM's copies, and a disk below vLLM's host memory
    own            `RitornelloConnector` with its own copies (`RITORNELLO_DEVICE=own`), to and from
                   a disk
    own-memory     as `own`, with the store in /dev/shm
    own-graphs     as `own`, with CUDA graphs
    NAME-restarted a new process with the store that the engine NAME has filled
    own-together   as `own-memory-restarted`, with all prompts sent together, and requests that are
                   aborted. KV memory has room for three prompts, so that vLLM preempts

Passes:

    cold           computes the prompts
    repeated       finds the prompts in GPU memory; of `none` and `own-graphs` only
    second         sends the prompts again, after GPU memory was overwritten with zeros
    restarted      the first pass of a new process; a store on a disk was dropped from the page
                   cache
    together       all prompts sent together; the time to the first token includes the wait for KV
                   memory

An answer is compared with the answer of `none` if the whole prompt was computed, or the whole
prompt was found: a prompt that is found in part is computed in steps of other sizes, which round
differently. Answers of the pass `together` are not compared: prompts that are computed together
round differently. The answers of `none` and `own-graphs` are compared with earlier answers of the
same engine; the reason for `own-graphs` is that CUDA graphs divide attention differently. All full
KV blocks of a prompt are compared, by digests, with the blocks of `none`. The exit status is 1 if
an answer differs, if a block differs although its prompt was computed or found whole, or if an
engine was not measured.

With `--tiny` the model has two small layers, to test this script.
"""

# ruff: noqa: E402
import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any

# Replace this folder on the module path: `import sglang` would find the file sglang.py in this
# folder instead of the package.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benches.gpu_cells.report import Report, Rows
from benches.gpu_vllm_parts.kinds import BLOCK, KINDS, LLAMA_8B, TINY, Bench
from benches.gpu_vllm_parts.processes import Answer, Engine, EngineError, model_writer

SHM = Path("/dev/shm")


class Baseline:
    """The answers of the engine `none`, kept in `file`. `compare` compares other engines with these
    answers.
    """

    def __init__(self, file: Path, run: dict[str, Any]) -> None:
        self._file, self._run = file, run
        self.answers: list[Answer] = []
        self._device: list[str] = []
        if file.exists():
            found = json.loads(file.read_text())
            if found["run"] != run:
                raise ValueError(
                    f"{file} belongs to another run, {found['run']}: choose another --out"
                )
            self.answers, self._device = found["answers"], found["device"]

    def set(self, device: list[str], answers: list[Answer]) -> None:
        self.answers, self._device = answers, device
        content = {"run": self._run, "device": device, "answers": answers}
        self._file.write_text(json.dumps(content))

    def check(self, device: list[str]) -> None:
        if device != self._device:
            raise EngineError(
                f"the engine `none` ran on {self._device}, not on {device}: choose another --out"
            )


def compare(answers: list[Answer], none: list[Answer], own: bool) -> tuple[Rows, list[str]]:
    """Returns the report's rows of an engine, and a line for each of its answers that differs, or
    whose blocks differ, from `none`. `own`: answers, but not blocks, are compared with earlier
    answers of the same engine instead.
    """
    colds = {answer["prompt"]: answer for answer in none if answer["pass"] == "cold"}
    rows, differences = [], []
    for at, answer in enumerate(answers):
        cold, tokens, cached = colds[answer["prompt"]], answer["tokens"], answer["cached"]
        # Whether the whole prompt was computed or found. An engine that finds the whole prompt
        # still computes its last token.
        whole = cached in (0, tokens - 1)
        alike = [
            other
            for other in (answers[:at] if own else none)
            if (other["prompt"], other["cached"]) == (answer["prompt"], cached)
        ]
        pairs = zip(answer["blocks"], cold["blocks"], strict=False)
        equal_blocks = sum(one == other for one, other in pairs)
        row = {
            "pass": answer["pass"],
            "prompt": answer["prompt"],
            "tokens": tokens,
            "cached": cached,
            "ttft s": answer["ttft"],
            "of cold": answer["ttft"] / cold["ttft"],
            "answer": "not compared",
            "equal blocks": f"{equal_blocks} of {len(cold['blocks'])}",
        }
        if "preemptions" in answer:
            row["preemptions"] = answer["preemptions"]
        # Prompts that are computed together round differently.
        if whole and alike and answer["pass"] != "together":
            same = alike[0]["output"] == answer["output"]
            row["answer"] = "equal" if same else "differs"
        if row["answer"] == "differs" or (whole and equal_blocks < len(cold["blocks"])):
            differences.append(
                f"{answer['pass']} {answer['prompt']}: answer {row['answer']}, "
                f"equal blocks {row['equal blocks']}"
            )
        rows.append(row)
    return rows, differences


def order(names: Sequence[str], measured: Sequence[str]) -> list[str]:
    """Returns the engines to run: engines of `names` that were not measured, preceded by `none` if
    it was not measured, and by engines that fill the store of a restarted engine.
    """
    missing = [name for name in names if name not in measured]
    if missing and "none" not in measured:
        missing = ["none", *(name for name in missing if name != "none")]
    planned: list[str] = []
    for name in missing:
        kind = KINDS[name]
        if kind.restarted and not any(KINDS[one].store == kind.store for one in planned):
            planned.append(next(one for one in KINDS if KINDS[one].store == kind.store))
        if name not in planned:
            planned.append(name)
    return planned


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


def measure(bench: Bench, names: Sequence[str], report: Report, baseline: Baseline) -> list[str]:
    """Runs engines. Returns a line for each engine that failed or did not run, and for each
    difference.
    """
    problems: list[str] = []
    with ExitStack() as stack:
        model = model_writer(bench)
        stack.callback(model.stop)
        engines: dict[str, Engine] = {}
        for at, name in enumerate(names):
            if monotonic() > bench.deadline:
                problems.append(f"{name} was not measured: run the command again to continue")
                continue
            # The next engine imports vLLM while this engine runs.
            for soon in names[at : at + 2]:
                if soon not in engines:
                    engines[soon] = Engine(bench, soon)
                    stack.callback(engines[soon].stop)
            try:
                model.wait()
                problems += run_engine(bench, engines[name], report, baseline)
            except EngineError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                problems.append(f"{name} was not measured")
    return problems


def run_engine(bench: Bench, engine: Engine, report: Report, baseline: Baseline) -> list[str]:
    """Runs an engine, and adds its rows to the report. Returns a line for each difference."""
    name = engine.name
    kind, began, old = KINDS[name], monotonic(), set(SHM.glob("vllm_offload_*"))
    if name != "none" and not baseline.answers:
        raise EngineError(
            "the engine `none`, with whose answers other engines are compared, gave no answers: "
            "read its log"
        )
    store = bench.store(kind)
    if kind.restarted and not store.exists():
        raise EngineError(
            f"{name} needs the store of an earlier engine, which has left none: read that "
            "engine's log"
        )
    if kind.restarted:
        drop_from_page_cache(store)
    else:
        shutil.rmtree(store, ignore_errors=True)
    try:
        description, answers = engine.run()
    finally:
        engine.stop()
        # If vLLM's host memory has a tier below it, vLLM removes the file of this memory only at an
        # orderly stop.
        for path in set(SHM.glob("vllm_offload_*")) - old:
            path.unlink(missing_ok=True)
    device = [description["device"], description["vllm"]]
    if name == "none":
        baseline.set(device, answers)
    baseline.check(device)
    rows, differences = compare(answers, baseline.answers, kind.own_answers)
    report.add(name, rows)
    print(f"{name}: {monotonic() - began:.1f} s\n{report.table(name)}", flush=True)
    return [f"{name} {difference}" for difference in differences]


def prompts_of(text: str) -> list[tuple[str, int]]:
    """Returns the name and the number of tokens of each prompt. `text`: the lengths in units of
    1024 tokens, separated by commas, and rounded down to whole blocks. A prompt has one token more
    than whole blocks: an engine that finds all blocks computes one token, whichever cache has the
    blocks. Raises ValueError for a text of another form, or a prompt without a whole block.
    """
    sizes = [int(float(size) * 1024) // BLOCK * BLOCK + 1 for size in text.split(",")]
    if min(sizes) <= BLOCK:
        raise ValueError(f"--prompts: a prompt needs at least {BLOCK} tokens")
    return [(f"{size}k-{at}", sizes[at]) for at, size in enumerate(text.split(","))]


def weights_folder(config: dict[str, Any], folder: Path, memory: Path) -> Path:
    """Returns a new folder: in `memory` if its free space exceeds four times the estimated size of
    the weights, otherwise in `folder`.
    """
    width = config["hidden_size"]
    layer = width * (config["intermediate_size"] * 3 + width * 3)
    weights = 2 * (config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * width)
    found = (memory if shutil.disk_usage(memory).free > 4 * weights else folder) / "weights"
    found.mkdir()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "engines",
        nargs="*",
        metavar="ENGINE",
        help=f"engines to run (default: all of {', '.join(KINDS)})",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=600,
        help="seconds after which engines are stopped (default 600)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-vllm-report"),
        help="folder of the report and of the logs (default gpu-vllm-report)",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="a directory on the disk to measure (default: the system's directory for temporary "
        "files)",
    )
    parser.add_argument(
        "--prompts",
        default="16,16,32",
        help="lengths of the prompts in units of 1024 tokens, separated by commas "
        "(default 16,16,32)",
    )
    parser.add_argument(
        "--layers", type=int, help="layers of the model (default 32; with --tiny 2)"
    )
    parser.add_argument("--tiny", action="store_true", help="use a model of two small layers")
    args = parser.parse_args()
    deadline = monotonic() + args.budget
    if unknown := [name for name in args.engines if name not in KINDS]:
        parser.error(f"unknown engine {unknown[0]}: choose from {', '.join(KINDS)}")
    report = Report(args.out, "gpu-vllm", " ".join(["benches/gpu_vllm.py", *sys.argv[1:]]), {})
    try:
        prompts = prompts_of(args.prompts)
        config = dict(TINY if args.tiny else LLAMA_8B)
        if args.layers:
            config["num_hidden_layers"] = args.layers
        longest = max(tokens for _, tokens in prompts)
        config["max_position_embeddings"] = max(40960, longest + 256)
        run = {"model": config, "prompts": args.prompts}
        baseline = Baseline(args.out / "gpu-vllm-none.json", run)
    except ValueError as error:
        parser.error(str(error))
    names = order(args.engines or list(KINDS), list(report.cells) if baseline.answers else [])
    # Exit through the context managers on SIGTERM, so that folders are removed and engines stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with (
        tempfile.TemporaryDirectory(dir=args.dir, prefix="ritornello-") as folder,
        tempfile.TemporaryDirectory(dir=SHM, prefix="ritornello-") as memory,
    ):
        weights = weights_folder(config, Path(folder), Path(memory))
        bench = Bench(config, prompts, args.out, Path(folder), weights, Path(memory), deadline)
        print(f"engines: {', '.join(names)}; weights in {weights}", flush=True)
        problems = measure(bench, names, report, baseline) if names else []
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
