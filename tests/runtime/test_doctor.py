import configparser
import io
import subprocess
import sys
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.runtime import doctor, machine
from flowrl.runtime.doctor import OPTIONAL, REQUIRED, failed, numbers, print_findings, probe
from flowrl.runtime.machine import Finding

ROOT = Path(fl.__file__).parent.parent
DEVICES = ["GPU-aaaa1111 NVIDIA H100", "GPU-aaaa2222 NVIDIA H100", "GPU-bbbb3333 NVIDIA H100"]


def test_every_finding_of_this_machine_has_text_and_those_that_are_wrong_a_cause():
    findings = probe()
    assert {"python", "flowrl", "torch", "pyzmq", "backend hf", "cores", "memory", "/dev/shm", "loopback"} <= {
        finding.what for finding in findings
    }
    assert all(finding.found for finding in findings)
    assert all(finding.cause for finding in findings if finding.status != "ok")
    assert not failed(findings)


def test_the_probe_imports_no_torch():
    code = "import sys; from flowrl.runtime.doctor import probe; probe(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_versions_wanted_are_those_of_setup_cfg():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].split()
    assert dict(line.split(">=") for line in lines) == REQUIRED
    extras = setup["options.extras_require"]
    assert {"megatron", "data"} <= set(extras)
    assert OPTIONAL["megatron-core"] == "pip install 'flowrl[megatron]'"


@pytest.mark.parametrize(
    ("version", "parts"), [("2.13.0+cpu", (2, 13, 0)), ("5.0rc1", (5,)), ("3.2", (3, 2)), ("26.2.0.post1", (26, 2, 0))]
)
def test_versions_compare_by_their_numbers(version, parts):
    assert numbers(version) == parts


def test_a_package_that_is_missing_or_old_fails_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(doctor, "installed", {"torch": "1.13", "flowrl": "0.1"}.get)
    findings = {finding.what: finding for finding in doctor._required()}
    assert findings["torch"].status == "fail"
    assert findings["torch"].found == "1.13"
    assert findings["torch"].cause == "flowrl needs 2.6 or later"
    assert findings["msgpack"].found == "not installed"
    assert findings["msgpack"].fix == "pip install 'msgpack>=1.1'"
    assert failed(findings.values())


def test_an_old_python_fails(monkeypatch):
    monkeypatch.setattr(doctor, "PYTHON", ((4, 0), (4, 1)))
    [finding] = doctor._python()
    assert finding.status == "fail"
    assert finding.cause == "flowrl runs on 4.0 up to, not including, 4.1"


def test_a_backend_that_is_not_installed_says_what_installs_it(monkeypatch):
    monkeypatch.setattr(doctor.registry, "missing_packages", lambda name: ("megatron.core",) * (name == "megatron"))
    monkeypatch.setattr(doctor.registry, "is_shipped", lambda name: name in ("hf", "megatron"))
    findings = {finding.what: finding for finding in doctor._backends()}
    assert findings["backend hf"].status == "ok"
    assert findings["backend vllm"].found == "not part of this flowrl"
    megatron = findings["backend megatron"]
    assert (megatron.status, megatron.found, megatron.fix) == (
        "warn", "needs megatron.core", "pip install 'flowrl[megatron]'"
    )  # fmt: skip
    assert megatron.cause == 'a model with backend="megatron" is refused'


@pytest.mark.parametrize(
    ("setting", "status", "says"),
    [
        (None, "ok", "CUDA_VISIBLE_DEVICES is not set: all are used"),
        ("2,0", "ok", "cuda:0 is device 2, cuda:1 is device 0"),
        (" 1 ", "ok", "cuda:0 is device 1"),
        ("GPU-bbbb", "ok", "cuda:0 is device 2"),
        ("MIG-x/1/0", "ok", "cuda:0 is MIG-x/1/0"),
        ("", "warn", "it hides every device"),
        ("-1", "warn", "it hides every device"),
        ("0,7,1", "warn", "'7' names no device: it and all after it are ignored, 1 remain"),
        ("0,-1,1", "warn", "'-1' names no device: it and all after it are ignored, 1 remain"),
        ("0,0", "warn", "a device stands twice, which makes CUDA see none"),
        ("0,GPU-aaaa1", "warn", "a device stands twice"),
        ("GPU-aaaa", "warn", "'GPU-aaaa' names no device: it hides all"),
        ("cuda:0", "warn", "'cuda:0' names no device: it hides all"),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(setting, status, says):
    finding = machine.visible(setting, DEVICES)
    assert finding.status == status
    assert says in finding.found + finding.cause
    assert finding.found.startswith("3: NVIDIA H100")


def test_devices_are_listed_under_any_value_of_the_variable(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    lines = ['[ -z "${CUDA_VISIBLE_DEVICES+set}" ] || exit 1', 'echo "GPU-1, NVIDIA H100"', 'echo "GPU-2, NVIDIA H100"']
    tool.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.list_devices() == ["GPU-1 NVIDIA H100", "GPU-2 NVIDIA H100"]


def test_a_torch_without_cuda_beside_devices_is_a_warning(monkeypatch):
    monkeypatch.setattr(machine, "list_devices", lambda: DEVICES)
    monkeypatch.setattr(machine, "installed", lambda package: "2.6.0+cpu")
    found = list(machine.devices({}))
    assert [finding.status for finding in found] == ["ok", "warn"]
    assert found[1].cause == "this torch was built without CUDA, and uses none of the devices"


def test_no_devices_are_right_unless_some_were_asked_for(monkeypatch):
    monkeypatch.setattr(machine, "list_devices", list)
    assert [finding.status for finding in machine.devices({})] == ["ok"]
    [asked] = machine.devices({"CUDA_VISIBLE_DEVICES": "0"})
    assert asked.cause == "CUDA_VISIBLE_DEVICES names devices that are not there"


def test_a_small_shared_memory_says_how_to_enlarge_it(monkeypatch):
    monkeypatch.setattr(machine, "SHM_BYTES", 2**70)
    [finding] = machine.shared_memory()
    assert finding.status == "warn"
    assert "docker run --shm-size=8g" in finding.fix
    [missing] = machine.shared_memory(Path("/dev/shm/not/there"))
    assert missing.status == "warn"


def test_a_low_limit_of_open_files_says_how_to_raise_it(monkeypatch):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda limit: (1024, 4096))
    [finding] = machine.open_files()
    assert (finding.status, finding.found, finding.fix) == ("warn", "1,024", "ulimit -n 4096")


def test_a_loopback_that_does_not_answer_fails(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(machine.socket, "create_server", refuse)
    [finding] = machine.loopback()
    assert (finding.status, finding.fix) == ("fail", "ip link set lo up")
    assert "Cannot assign requested address" in finding.cause


def test_a_temporary_folder_too_long_for_sockets_fails(tmp_path):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    [finding] = machine.socket_folder(str(long))
    assert (finding.status, finding.fix) == ("fail", "export TMPDIR=/tmp")
    assert "107 bytes" in finding.cause


def test_a_share_of_cores_is_read_from_the_control_group(tmp_path):
    file = tmp_path / "cpu.max"
    file.write_text("150000 100000\n")
    assert machine._quota(file) == 1.5
    file.write_text("max 100000\n")
    assert machine._quota(file) is None


def test_findings_print_as_lines_with_cause_and_way_out():
    out = io.StringIO()
    wrong = Finding(what="bb", status="fail", found="2", cause="c", fix="d")
    print_findings([Finding(what="a", status="ok", found="1"), wrong], out)
    assert out.getvalue().splitlines() == [
        "ok    a   1", "fail  bb  2", "          c", "          fix: d", "1 ok, 0 warn, 1 fail"
    ]  # fmt: skip
