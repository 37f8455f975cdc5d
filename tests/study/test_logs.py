"""Logs: the norms in files of other loggers, and a sentence for what has none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.helpers import recursion_limit
from torchzero_clip import Trace
from torchzero_clip.study.logs import Log

NORMS = [[0.5], [1.5], [0.25]]
READ = {
    "by hand": "step,grad_norm\n10,0.5\n20,1.5\n30,0.25\n",
    "TensorBoard": "Wall time,Step,Value\n1.7e9,10,0.5\n1.7e9,20,1.5\n1.7e9,30,0.25\n",
    "TensorBoard as JSON": "[[1.7e9, 10, 0.5], [1.7e9, 20, 1.5], [1.7e9, 30, 0.25]]",
    "Weights & Biases": (
        '"Step","calm-sea-1 - train/grad_norm","calm-sea-1 - train/grad_norm__MIN",'
        '"calm-sea-1 - train/grad_norm__MAX"\n"10","0.5","0.5","0.5"\n"20","1.5","1.5","1.5"\n'
        '"30","0.25","0.25","0.25"\n'
    ),
    "Lightning": (
        "epoch,grad_2.0_norm_total,step,val_loss\n0,0.5,10,\n0,1.5,20,\n0,,20,2.5\n0,0.25,30,\n"
    ),
    "a validation between": (
        '{"step": 10, "grad_norm": 0.5}\n{"step": 10, "eval_loss": 3}\n'
        '{"step": 20, "grad_norm": 1.5}\n{"step": 30, "grad_norm": 0.25}\n'
    ),
    "objects in objects": (
        '{"_step": 10, "train": {"grad_norm": 0.5}}\n{"_step": 20, "train": {"grad_norm": 1.5}}\n'
        '{"_step": 30, "train": {"grad_norm": 0.25}}\n'
    ),
    "trainer_state.json": json.dumps(
        {
            "best_metric": None,
            "log_history": [
                {"step": 10, "grad_norm": 0.5, "loss": 2.0},
                {"step": 20, "grad_norm": 1.5, "loss": 2.0},
                {"step": 20, "eval_loss": 2.0},
                {"step": 30, "grad_norm": 0.25, "loss": 2.0},
            ],
        },
        indent=2,
    ),
    "semicolons": "Iteration;Gradient norm;lr\n10;0,5;1e-3\n20;1,5;1e-3\n30;0,25;1e-3\n",
    "printed dicts": (
        "{'loss': 2.0, 'grad_norm': 0.5, 'step': 10}\n{'grad_norm': 1.5, 'step': 20}\n"
        "{'grad_norm': 0.25, 'step': 30, 'eval': None}\n"
    ),
    "numpy.savetxt": "# step grad_norm\n10 5.0e-01\n20 1.5e+00\n30 2.5e-01\n",
    "said above": "# run 7, on two cards\n#step,grad_norm\n10,0.5\n20,1.5\n30,0.25\n",
    "a name of two words": "Step,Grad Norm\n10,0.5\n20,1.5\n30,0.25\n",
    "pandas, with its index": ",step,grad_norm\n0,10,0.5\n1,20,1.5\n2,30,0.25\n",
    "tabs": "iter\tgnorm\n10\t0.5\n20\t1.5\n30\t0.25\n",
    "tensors": (
        "step,grad_norm\n10,tensor(0.5)\n20,\"tensor(1.5, device='cuda:0')\"\n30,tensor(0.25)\n"
    ),
    "words beside": "time,global_step,total_norm\nnoon,10,0.5\none,20,1.5\ntwo,30,0.25\n",
    "a run that began anew at step 20": "step,grad_norm\n10,0.5\n20,9\n30,9\n20,1.5\n30,0.25\n",
    "spaces": "step, grad_norm\n10, 0.5\n20, 1.5\n30, 0.25\n",
    "Windows": "\ufeffstep,grad_norm\r\n10,0.5\r\n20,1.5\r\n30,0.25\r\n",
    "a bound beside": "step,max_grad_norm,grad_norm\n10,1,0.5\n20,1,1.5\n30,1,0.25\n",
    "what a limit left": "step,grad_norm_clipped,grad_norm\n10,0,0.5\n20,1,1.5\n30,0,0.25\n",
}  # fmt: skip


@pytest.mark.parametrize("logger", READ)
def test_the_norms_of_other_loggers_are_found_with_their_steps(logger, tmp_path: Path) -> None:
    (tmp_path / "run.csv").write_text(READ[logger], encoding="utf-8", newline="")
    trace = Trace.read(tmp_path / "run.csv")
    assert trace.norms.tolist() == NORMS
    assert trace.steps.tolist() == [10, 20, 30]
    assert trace.stride == 10


def test_a_norm_a_parameter_has_the_names_of_the_parameters(tmp_path: Path) -> None:
    header = "step,grad_2.0_norm/a.weight,grad_2.0_norm/a.bias,grad_2.0_norm_total"
    (tmp_path / "metrics.csv").write_text(f"{header}\n0,3.0,4.0,5.0\n50,0.3,0.4,0.5\n")
    trace = Trace.read(tmp_path / "metrics.csv")
    assert trace.names == ["a.weight", "a.bias"]
    assert trace.total.tolist() == pytest.approx([5.0, 0.5])
    assert Trace.read(tmp_path / "metrics.csv", "grad_2.0_norm_total").norms[0].tolist() == [5.0]


def test_what_a_rule_measured_goes_before_what_was_logged(tmp_path: Path) -> None:
    (tmp_path / "run.csv").write_text("step,grad_norm,ZClip/norm\n1,9.0,0.5\n2,9.0,1.5\n")
    assert Trace.read(tmp_path / "run.csv").norms.tolist() == NORMS[:2]


def test_a_norm_that_is_no_number_stays_one(tmp_path: Path) -> None:
    (tmp_path / "run.csv").write_text("step,grad_norm\n1,0.5\n2,nan\n3,inf\n")
    trace = Trace.read(tmp_path / "run.csv")
    assert (trace.known.all(), len(trace), trace.norms[2].item()) == (True, 3, float("inf"))


@pytest.mark.parametrize("column", ["grad_norm", "norm", "ClipNorm/norm", "norm/net.weight"])
def test_rows_without_a_norm_are_skipped_whatever_the_column_is_called(
    column: str, tmp_path: Path
) -> None:
    """Lightning writes the learning rate and the metrics of a step into different rows."""
    rows = f"epoch,{column},lr-AdamW,step\n,,0.1,0\n0,5.0,,0\n,,0.1,1\n0,6.0,,1\n0,nan,,2\n"
    (tmp_path / "metrics.csv").write_text(rows + "0,7.0,,1\n")  # step 1 is logged twice
    trace = Trace.read(tmp_path / "metrics.csv")
    assert trace.norms[:2].tolist() == [[5.0], [7.0]]
    assert trace.norms[2].isnan().all()
    assert trace.known.all()
    assert trace.steps.tolist() == [0, 1, 2]


def test_each_row_of_a_recorder_is_a_step_also_without_a_norm(tmp_path: Path) -> None:
    """A step that a guard skipped has no norm, and a norm that is NaN is known."""
    rows = "step,stands_for,ZClip/norm\n1,1,5.0\n2,1,\n3,1,nan\n"
    (tmp_path / "run.csv").write_text(rows)
    trace = Trace.read(tmp_path / "run.csv")
    assert trace.known[:, 0].tolist() == [True, False, True]
    assert trace.steps.tolist() == [1, 2, 3]


def test_what_excel_and_a_power_shell_write_is_text(tmp_path: Path) -> None:
    (tmp_path / "run.csv").write_bytes("step,grad_norm\r\n1,0.5\r\n".encode("utf-16"))
    assert Trace.read(tmp_path / "run.csv").norms.tolist() == [[0.5]]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"epoch,loss\n1,0.5\n", r"such as grad_norm, .* columns are \['epoch', 'loss'\]"),
        (
            b"1,0.5\n2,0.7\n",
            "must have the names of the columns, such as step,grad_norm, got 1,0.5",
        ),
        (b"step,grad_norm\n1,\n2,\n", "column 'grad_norm' of .* has no numbers"),
        (b"step,grad_norm\n1,big\n", "column 'grad_norm' .* numbers in all cells: .*'big'"),
        (b"\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7f", "must be a CSV or JSON file"),
        (b'{"step": 1}\n{"step: 2}\n{"step": 3}\n', "must be a JSON object, got line 2"),
        (b'{"step": 1}\n', r"its columns are \['step'\]"),
        (b"step 1 | loss 2.0 | norm 0.5\nstep 2 | loss 2.0 | norm 0.5\n", "its columns are "),
        (b"[]", "has no steps"),
        (b'["a", 3]', "has no steps"),
        (b" \n", "has no steps"),
    ],
)
def test_another_shape_gets_a_sentence_with_what_there_is_and_what_is_wanted(
    text, sentence, tmp_path: Path
) -> None:
    (tmp_path / "run.csv").write_bytes(text)
    with pytest.raises(ValueError, match=sentence):
        Trace.read(tmp_path / "run.csv")


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text('{"step": 1, "grad_norm": 0.5}\n{"step": 2, "grad')
    with pytest.warns(UserWarning, match="is incomplete, so Trace skips this line"):
        assert len(Trace.read(tmp_path / "run.jsonl")) == 1


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("step,grad_norm\n10,0.5\n20,1.5\n30,0.25", 3),
        ("step,grad_norm\r\n10,0.5\r\n20,1.5\r\n30,0.25", 3),
        ("step;grad_norm\n10;0,5\n20;1,5\n30;0,25", 3),
        ("# a run\nstep,grad_norm,loss\n10,0.5,\n20,1.5,\n30,0.25,", 3),
        ("step,grad_norm\n10,0.5", 1),
    ],
)
def test_a_last_line_without_a_newline_counts_if_it_is_whole(text, rows, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_bytes(text.encode())
    with pytest.warns(UserWarning, match="may be incomplete, but Trace uses this line"):
        assert Trace.read(path).norms.tolist() == NORMS[:rows]


@pytest.mark.parametrize("end", ["30", "30,", "30,0.25e", "30,0.25,", '30,"0.25', "9" * 200_000])
def test_a_last_line_that_is_no_row_is_left_out(end: str, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text(f"step,grad_norm\n10,0.5\n20,1.5\n{end}")
    with pytest.warns(UserWarning, match="is incomplete, so Trace skips this line"):
        assert Trace.read(path).norms.tolist() == NORMS[:2]


DAMAGED = bytearray(gzip.compress(b"step,grad_norm\n" + b"5,1.5\n7,2.5\n" * 99, mtime=0))
DAMAGED[len(DAMAGED) // 2] ^= 255


NO_LOGS = [
    (b"[" * 100_000, "brackets are nested too deeply"),
    (b'{"a":' * 100_000, "brackets are nested too deeply"),
    (b'{"step": 1, "grad_norm": 1}\n' + b"[" * 100_000 + b"\n{}\n", "too deep"),
    (b'{"a":' * 3000 + b"1" + b"}" * 3000, "too deep"),
    (b"{\"a\": 1}\n{'a': 1 + x}\n{}\n", r"must be a JSON object, got line 2: {'a': 1 \+ x}$"),
    (b"{\"a\": 1}\n{'a': {[]: 1}}\n{}\n", r"must be a JSON object, got line 2: {'a': {\[\]: 1}}$"),
    (b'{"log_history": 5}', "log_history in .* must be a list, got int"),
    (b"\xff\xfe", "has no steps"),
    (b"\xef\xbb\xbf", "has no steps"),
    (b"\x1f\x8b", "has no steps"),
    (b"\x1f\x8bxxxxxxxxxxxxxxxx", r"must be an intact \.gz file, or a text file"),
    (bytes(DAMAGED), r"must be an intact \.gz file, or a text file"),
    (b"step,grad_norm\n1," + b"1" * 200_000 + b"\n", "larger than"),
]


@pytest.mark.parametrize(("contents", "sentence"), NO_LOGS, ids=range(len(NO_LOGS)))
def test_what_no_logger_writes_gets_a_sentence(contents: bytes, sentence: str, tmp_path) -> None:
    (tmp_path / "run.csv").write_bytes(contents)
    for limit in (1000, 20_000):  # others in a process raise it
        with recursion_limit(limit), pytest.raises(ValueError, match=sentence):
            Trace.read(tmp_path / "run.csv")


@pytest.mark.parametrize("step", ["1e300", "-1e308", "inf", "1e20", "nan", ""])
@pytest.mark.parametrize("norm", ["norm", "grad_norm"])
def test_steps_that_count_nothing_are_counted(step: str, norm: str, tmp_path: Path) -> None:
    (tmp_path / "run.csv").write_text(f"step,{norm}\n-1e308,0.5\n1e308,1.5\n{step},0.5\n")
    trace = Trace.read(tmp_path / "run.csv")
    assert trace.stride == 1
    assert trace.steps.tolist() == [*range(1, len(trace) + 1)]


def test_steps_are_kept_by_a_file_and_by_a_part(tmp_path: Path) -> None:
    (tmp_path / "run.csv").write_text(READ["by hand"])
    trace = Trace.read(tmp_path / "run.csv")
    trace.write(tmp_path / "again.csv")
    assert Trace.read(tmp_path / "again.csv").steps.tolist() == [10, 20, 30]
    part = trace.part(1)
    assert (part.steps.tolist(), part.norms.tolist(), part.stride) == ([20, 30], NORMS[1:], 10)


@pytest.mark.parametrize("last", ["0.5", "", "None", "tensor(0.5, device='cuda:0')", " 1e5 "])
def test_a_column_is_read_as_its_cells_are(last: str) -> None:
    column = ["1", "2.5", "nan", "-inf", last]
    log = Log({"norm": column}, "a file")
    numbers = log.numbers(column)
    assert numbers.tolist() == pytest.approx([log.number(cell) for cell in column], nan_ok=True)
    assert log.known("norm", numbers).tolist() == [True] * 4 + [last not in ("", "None")]
