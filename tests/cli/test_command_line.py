"""The command line: exit codes, JSON, tables, bad input, interruptions, and the commands of docs/command_line.md."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import qtoolkit as qt
import qtoolkit_command
from qtoolkit.cli import main
from qtoolkit.export.files.reading import open_graph
from qtoolkit.export.lint import FILE_RULES, rules_of
from qtoolkit.extras import install_command
from qtoolkit.lint.fusions import FILE_ADVICE
from qtoolkit.lint.layers import ADVICE
from qtoolkit.lint.slower import SLOWER
from tests.export.qdq_files import File, clean
from tests.export.test_lint_files import UINT8, codes_for_a_float_op, signed_in_and_unsigned_out, two_quantizers

PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
RUN = [sys.executable, "-m", "qtoolkit"]


def test_lint(tmp_path, capsys) -> None:
    path = clean().save(tmp_path)
    assert main(["lint", path, "--backend", "tensorrt"]) == 0
    assert f"{path}: 0 findings for tensorrt;" in capsys.readouterr().out.replace("\n", "")
    bad = two_quantizers().save(tmp_path)
    assert main(["lint", bad, "--backend", "tensorrt"]) == 1
    out = capsys.readouterr().out
    assert "one-quantizer" in out
    assert "1 finding for tensorrt" in out.replace("\n", " ")


def test_lint_as_json(tmp_path, capsys) -> None:
    path = two_quantizers().save(tmp_path)
    assert main(["lint", path, "--backend", "tensorrt", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["file", "backend", "rules", "findings", "beside_float16"]
    assert found["rules"] == [rule.name for rule in rules_of(qt.backends["tensorrt"])]
    (finding,) = found["findings"]
    assert list(finding) == ["node", "rule", "message", "source", "remedy"]
    assert (finding["node"], finding["rule"]) == ("relu", "one-quantizer")


def test_lint_reads_the_file_once(tmp_path, capsys, monkeypatch) -> None:
    path, opened = clean().save(tmp_path), []
    monkeypatch.setattr(
        sys.modules["qtoolkit.export.lint"], "open_graph", lambda path: opened.append(path) or open_graph(path)
    )
    assert main(["lint", path, "--backend", "tensorrt", "--advice", "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert opened == [path]
    assert found["beside_float16"]["findings"] == [
        {"node": each.where, "rule": each.name, "message": each.rule, "source": each.source, "remedy": each.remedy}
        for each in qt.export.estimate_engine(path, "tensorrt").findings
    ]


def test_advice_is_asked_for(tmp_path, capsys) -> None:
    path = codes_for_a_float_op().save(tmp_path)
    assert main(["lint", path, "--backend", "tensorrt"]) == 0
    assert main(["lint", path, "--backend", "tensorrt", "--advice"]) == 1
    assert "floats-only" in capsys.readouterr().out


def test_verify(tmp_path, capsys) -> None:
    path = clean().save(tmp_path)
    assert main(["verify", path, "--runtime", "onnxruntime", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (run,) = found["runtimes"]
    assert (run["differing"], run["first_difference"], run["not_compared"]) == (0, None, [])
    assert [each["quantizer"] for each in run["quantizers"]] == ["q_x", "q_relu"]
    assert run["compared"] == 2 * 16 * 64
    assert main(["verify", path, "--runtime", "onnxruntime", "--seed", "3"]) == 0
    assert "0 of 2048 quantized values differ" in capsys.readouterr().out


def test_verify_reads_a_file_without_zero_points(tmp_path, capsys) -> None:
    file = File()
    x = file.node("Relu", file.pair(file.node("Relu", file.input("x", 1, 16, 8, 8)), zero=None, name="q_x"))
    file.output(file.pair(x, zero=None, name="q_y"))
    assert main(["verify", file.save(tmp_path), "--runtime", "onnxruntime", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runtimes"]
    assert [each["quantizer"] for each in run["quantizers"]] == ["q_x", "q_y"]


def test_verify_finds_codes_that_differ(tmp_path, capsys, monkeypatch) -> None:
    from qtoolkit.export.verification import between_runtimes

    run = between_runtimes.EXECUTES["onnxruntime"]

    def shifted(path, tensors, nodes, grids, optimized):
        done = run(path, tensors, nodes, grids, optimized)
        if optimized:
            done.codes["t2_0" if "t2_0" in done.codes else next(iter(done.codes))].flat[0] += 1
        return done

    monkeypatch.setattr(between_runtimes, "EXECUTES", {"onnxruntime": shifted})
    path = clean().save(tmp_path)
    assert main(["verify", path, "--runtime", "onnxruntime"]) == 1
    out = capsys.readouterr().out
    assert "1 of 2048 quantized values differ, by at most 1 steps" in out
    assert "first difference: q_x" in out
    assert main(["verify", path, "--runtime", "onnxruntime", "--allow", "1e-3"]) == 0


def test_verify_says_that_a_file_saturates_on_this_processor(tmp_path, capsys, monkeypatch) -> None:
    from qtoolkit.export.verification.runtimes import onnxruntime_cpu

    file = File()
    x = file.pair(file.input("x", 1, 16, 8, 8), zero=128, dtype=UINT8, name="q_x")
    codes = file.constant(np.full((16, 16, 3, 3), 127, np.int8))
    weight = file.node("DequantizeLinear", codes, file.constant(np.float32(0.01)), file.constant(np.int8(0)))
    file.output(file.pair(file.node("Conv", x, weight, name="conv"), zero=128, dtype=UINT8, name="q_y"))
    path = file.save(tmp_path)
    for saturates in (False, True):
        monkeypatch.setattr(onnxruntime_cpu, "processor_saturates", lambda saturates=saturates: saturates)
        assert main(["verify", path, "--runtime", "onnxruntime", "--allow", "1", "--json"]) == saturates
        (run,) = json.loads(capsys.readouterr().out)["runtimes"]
        assert run["saturating"] == ["conv"] * saturates
    assert main(["verify", path, "--runtime", "onnxruntime", "--allow", "1"]) == 1
    assert "layers with saturating sums on this processor: conv" in capsys.readouterr().out


def test_verify_reads_a_file_whose_output_is_quantized_in_openvino(tmp_path, capsys) -> None:
    pytest.importorskip("openvino")
    file = File()
    file.output(file.pair(file.conv(file.pair(file.input("x", 1, 16, 8, 8), name="q_x")), name="q_y"))
    assert main(["verify", file.save(tmp_path), "--runtime", "openvino", "--json", "--allow", "0.01"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runtimes"]
    assert [each["quantizer"] for each in run["quantizers"]] == ["q_x", "q_y"]


def test_info_on_a_file(tmp_path, capsys) -> None:
    path = signed_in_and_unsigned_out().save(tmp_path)
    assert main(["info", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["opsets"] == {"ai.onnx": 21}
    assert found["inputs"] == [{"name": "x", "dtype": "FLOAT", "shape": [1, 16, 8, 8]}]
    assert (found["quantize_nodes"], found["dequantize_nodes"]) == (2, 5)
    assert (found["activations"], found["weights"]) == ({"INT8": 1, "UINT8": 1}, {"INT8": 2})
    assert [(layer["layer"], layer["quantized"]) for layer in found["layers"]] == [("conv", True), ("next", True)]
    assert found["bytes"] == Path(path).stat().st_size
    file = File()
    file.output(file.conv(file.input("x", 1, 16, 8, 8)))
    assert main(["info", file.save(tmp_path)]) == 0
    assert "'x' is not quantized" in capsys.readouterr().out


def test_info_on_the_installation(capsys) -> None:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"]["version"] == torch.__version__
    assert found["packages"]["onnx"] == onnx.__version__
    assert main(["info"]) == 0
    table = capsys.readouterr().out
    assert found["instruction_set"] in table
    assert main([]) == 0
    assert capsys.readouterr().out == table


def refused(capsys, *argv: str) -> str:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qtoolkit: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("command", ["lint", "verify", "info"])
def test_bad_files_give_a_sentence_and_exit_code_2(command: str, tmp_path, capsys) -> None:
    backend = ("--backend", "tensorrt") if command == "lint" else ()
    text = tmp_path / "text.onnx"
    text.write_text("no model")
    assert "is not an ONNX file, or is truncated" in refused(capsys, command, str(text), *backend)
    assert "does not exist" in refused(capsys, command, str(tmp_path / "none.onnx"), *backend)
    file = clean()
    file.output(file.node("Frobnicate", "x"))
    assert "an op that ONNX does not know" in refused(capsys, command, file.save(tmp_path), *backend)
    outside = tmp_path / "outside.onnx"
    onnx.save(clean().model(), outside, save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").unlink()
    assert "'weights', which is missing" in refused(capsys, command, str(outside), *backend)
    if command != "info":
        file = File()
        file.output(file.node("Relu", file.input("x", 1, 4)))
        assert "has no QuantizeLinear" in refused(capsys, command, file.save(tmp_path), *backend)


def test_bad_arguments_of_verify(tmp_path, capsys) -> None:
    path, npz, other = clean().save(tmp_path), tmp_path / "x.npz", tmp_path / "other.npz"
    npz.write_text("nothing")
    np.savez(other, y=np.zeros(3, np.float32))
    assert "'x' is missing" in refused(capsys, "verify", path, "--inputs", str(other))
    assert "is not a .npz file" in refused(capsys, "verify", path, "--inputs", str(npz))
    assert "does not exist" in refused(capsys, "verify", path, "--inputs", str(tmp_path / "none.npz"))
    assert "is not a torch.export program" in refused(capsys, "verify", path, "--model", path)
    assert "--allow must be a share" in refused(capsys, "verify", path, "--allow", "2")
    np.savez(other, x=np.zeros((1, 2, 3), np.float32))
    assert "onnxruntime cannot run" in refused(
        capsys, "verify", path, "--inputs", str(other), "--runtime", "onnxruntime"
    )


@pytest.mark.parametrize("argv", [["lint"], ["lint", "x", "--backend", "tensort"], ["verify", "x", "--runtime", "y"]])
def test_wrong_arguments_exit_with_2(argv: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage: qtoolkit" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_needs_rich(terminal: bool, tmp_path, capsys, monkeypatch) -> None:
    """Without it, a terminal gets the lines that a pipe gets."""
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert main(["info"]) == 0
    assert f"torch\t{torch.__version__}, library built for" in capsys.readouterr().out
    assert main(["lint", two_quantizers().save(tmp_path), "--backend", "tensorrt"]) == 1
    assert "\tone-quantizer\t" in capsys.readouterr().out


def test_without_onnx_it_says_what_to_install(tmp_path, capsys, monkeypatch) -> None:
    path = clean().save(tmp_path)
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert install_command("onnx") in refused(capsys, "lint", path, "--backend", "tensorrt")


@pytest.mark.slow
def test_a_closed_pipe_leaves_no_traceback(tmp_path) -> None:
    path = two_quantizers().save(tmp_path)
    command = f"{shlex.join([*RUN, 'lint', path, '--backend', 'tensorrt', '--json'])} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("141", "1")  # 1: it wrote before the pipe was closed
    assert done.stderr == ""


@pytest.mark.slow
def test_ctrl_c_leaves_no_traceback() -> None:
    code = (
        "import signal, sys, time; import qtoolkit.cli as cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background starts without it
        "cli.COMMANDS['info'] = lambda given: (print('ready', flush=True), time.sleep(60))\n"
        "sys.exit(cli.main(['info', 'a.onnx', 'b.onnx']))"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=30)
    assert (run.returncode, err) == (130, "qtoolkit: interrupted.\n")


@pytest.mark.parametrize(
    "how", [("-c", "import sys, qtoolkit_command; sys.exit(qtoolkit_command.main())"), ("-m", "qtoolkit")]
)
def test_ctrl_c_while_torch_is_imported_leaves_no_traceback(tmp_path, how: tuple[str, str]) -> None:
    (tmp_path / "torch.py").write_text(
        "import time\n"
        "print('importing', flush=True)\n"
        "try:\n    time.sleep(60)\nexcept BaseException:\n    raise ImportError('lost') from None\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(qt.__file__).parents[1]}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    foreground = (  # a job in the background starts without Ctrl-C
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    run = subprocess.Popen([sys.executable, "-c", foreground, *how, "info"], env=env, text=True, cwd=tmp_path, **pipes)
    assert run.stdout.readline() == "importing\n"
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=30)
    assert (run.returncode, err) == (130, "qtoolkit: interrupted.\n")


def test_the_command_is_the_command_line(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["qtoolkit", "info", "--json"])
    before = signal.getsignal(signal.SIGINT)
    assert qtoolkit_command.main() == 0
    assert json.loads(capsys.readouterr().out)["qtoolkit"] == qt.__version__
    assert signal.getsignal(signal.SIGINT) is before


# ---- several files, pipes and terminals


def test_several_files_and_the_highest_exit_code(tmp_path, capsys) -> None:
    (tmp_path / "bad").mkdir()
    good, bad = clean().save(tmp_path), two_quantizers().save(tmp_path / "bad")
    assert main(["lint", good, bad, "--backend", "tensorrt"]) == 1
    out = capsys.readouterr().out
    assert f"{good}: 0 findings" in out
    assert f"{bad}: 1 finding for" in out
    missing = str(tmp_path / "none.onnx")
    assert main(["lint", missing, bad, "--backend", "tensorrt"]) == 2
    out, err = capsys.readouterr()
    assert f"{bad}: 1 finding for" in out, "the files behind a bad one are checked"
    assert "does not exist" in err
    assert main(["verify", good, good, "--runtime", "onnxruntime"]) == 0
    assert capsys.readouterr().out.count("0 of 2048 quantized values differ") == 2


def test_several_files_as_json(tmp_path, capsys) -> None:
    """An object for each, one behind the other, as jq reads them."""
    (tmp_path / "b").mkdir()
    paths = [clean().save(tmp_path), signed_in_and_unsigned_out().save(tmp_path / "b")]
    assert main(["info", *paths, "--json"]) == 0
    out, found = capsys.readouterr().out.strip(), []
    while out:
        value, end = json.JSONDecoder().raw_decode(out)
        found, out = [*found, value["file"]], out[end:].lstrip()
    assert found == paths


LONG = "a_layer_with_a_name_of_more_than_a_hundred_and_twenty_characters." * 3 + "conv"


def renamed(folder: Path) -> str:
    """A file with a finding at a node of a long name."""
    model = two_quantizers().model()
    for node in model.graph.node:
        if node.name == "relu":
            node.name = LONG
    onnx.save(model, folder / "long.onnx")
    return str(folder / "long.onnx")


def test_a_pipe_gets_a_line_for_each_row_and_no_name_is_broken(tmp_path, capsys) -> None:
    path = renamed(tmp_path)
    assert main(["lint", path, "--backend", "tensorrt"]) == 1
    finding, counted, *_ = capsys.readouterr().out.splitlines()
    assert finding.split("\t")[:3] == [path, LONG, "one-quantizer"]
    assert len(finding.split("\t")) == 5
    assert counted.startswith(f"{path}: 1 finding for tensorrt; ")
    assert main(["info", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(f"{path}\t") for line in lines)
    assert any(line.startswith(f"{path}\tinput\tx: FLOAT [") for line in lines)


def on_a_terminal(*argv: str, **env: str) -> str:
    """Run the command on a terminal of 80 columns, and return all that it writes."""
    reader, writer = pty.openpty()
    run = subprocess.Popen(
        [*RUN, *argv], stdin=writer, stdout=writer, stderr=writer, env={**os.environ, "COLUMNS": "80", **env}
    )
    os.close(writer)
    written = b""
    while True:
        try:
            part = os.read(reader, 1 << 16)
        except OSError:  # Linux says so at the end
            break
        if not part:
            break
        written += part
    os.close(reader)
    assert run.wait() in (0, 1), written
    return written.decode()


@pytest.mark.slow
def test_a_terminal_gets_a_table_and_no_color_where_it_is_not_wanted(tmp_path) -> None:
    pytest.importorskip("rich")
    path = renamed(tmp_path)
    drawn = on_a_terminal("lint", path, "--backend", "tensorrt", TERM="xterm-256color", NO_COLOR="")
    assert "\x1b[" in drawn
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in drawn.splitlines()) <= 80
    plain = on_a_terminal("lint", path, "--backend", "tensorrt", TERM="xterm-256color", NO_COLOR="1")
    assert "\x1b" not in plain
    assert plain.splitlines() == re.sub(r"\x1b\[[\d;]*m", "", drawn).splitlines()


# ---- the documentation


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    program, first = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(program, "docs/command_line.md", "exec"), {})
    Path("first.py").write_text(first)
    commands = 0
    for block in re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL):
        for command, _, shown in (part.partition("\n") for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]):
            capsys.readouterr()
            typed, _, comment = command.partition("#")
            name, *argv = shlex.split(typed)
            assert name == "qtoolkit"
            assert main(argv) == int(comment.rpartition(" ")[2] or 0), command
            out = capsys.readouterr().out
            assert out.startswith(shown), (command, out)
            commands += 1
    monkeypatch.delitem(sys.modules, "first")
    assert commands == PAGE.count("$ qtoolkit ") >= 6


def test_the_page_names_every_command_and_option() -> None:
    parser = qtoolkit_command.parser()
    (commands,) = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    options = {o for command in (parser, *commands.values()) for a in command._actions for o in a.option_strings}
    assert [name for name in (*commands, *options - {"-h"}) if name not in PAGE] == []


def test_the_page_names_every_rule() -> None:
    named = re.findall(
        r"^\| `([\w-]+)` \| [^|]*\| ", PAGE[PAGE.index("### The rules") : PAGE.index("## verify")], flags=re.MULTILINE
    )
    rules = [rule.name for rule in (*FILE_RULES, *ADVICE.values(), *FILE_ADVICE, *SLOWER)]
    assert sorted(named) == sorted(set(rules))
