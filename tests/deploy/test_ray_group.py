"""deploy/overlays/multi-node-ray: the commands of its machines work with a real Ray."""

import os
import re
import subprocess
import sys

from local_ray import kill, need_ray, ray_folder
from manifests import ROOT, arguments, container
from vllm_kvcompress.serving.process import free_port

# Replaces the server: like vLLM it waits until Ray has all devices, then prints its arguments.
SERVER = """#!{python}
import sys, time, ray
ray.init(address="auto", log_to_driver=False)
while ray.cluster_resources().get("GPU", 0) < 16:
    time.sleep(0.2)
print("MACHINES", sum(node["Alive"] for node in ray.nodes()))
print(*sys.argv[1:], sep="\\n")
"""


def script(own, number):
    """Return a container's command, changed so that two of them can run on one machine."""
    shell, flags, text, *name = own["command"]
    extra_flags = "--num-cpus=1 --num-gpus=8 --min-worker-port=0 --max-worker-port=0"
    changes = {
        "6379": str(number),
        "--object-store-memory=1073741824": f"--object-store-memory={80 * 2**20} {extra_flags}"
        f" --dashboard-agent-listen-port={free_port()}",
    }
    if "--head" in text:
        client = f"--ray-client-server-port={free_port()}"
        changes["--include-dashboard=false"] = f"--include-dashboard=false {client}"
    for before, after in changes.items():
        assert text.count(before) == 1, (before, text)
        text = text.replace(before, after)
    return [shell, flags, text, *name]


def test_machines_form_one_ray_cluster_and_the_server_gets_its_arguments(rendered, tmp_path):
    need_ray()
    from ray.util import get_node_ip_address

    objects = rendered["multi-node-ray"]
    (tmp_path / "ray").write_text(f'#!/bin/sh\nexec {sys.executable} -m ray.scripts.scripts "$@"\n')
    server = tmp_path / "entrypoint.sh"
    server.write_text(SERVER.format(python=sys.executable))
    for command in (tmp_path / "ray", server):
        command.chmod(0o755)
    port, server_args = free_port(), arguments(objects)
    leader, worker = (script(container(objects, number), port) for number in (0, 1))
    assert leader[2].count("/opt/entrypoint.sh") == 1
    leader[2] = leader[2].replace("/opt/entrypoint.sh", str(server))
    with ray_folder() as (folder, environment):
        address = get_node_ip_address()
        pod = {**os.environ, **environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        pod |= {"VLLM_HOST_IP": address, "LWS_LEADER_ADDRESS": address}
        with (tmp_path / "worker").open("wb") as log:
            joining = subprocess.Popen(worker, env=pod, stdout=log, stderr=subprocess.STDOUT)
        try:
            options = dict(env=pod, capture_output=True, text=True, timeout=300)
            done = subprocess.run([*leader, *server_args], **options, check=False)
            assert done.returncode == 0, done.stderr + (tmp_path / "worker").read_text()
            assert joining.poll() is None
        finally:
            kill(folder)  # as a container ends all processes with its first one
            joining.wait()
    assert done.stdout.partition("MACHINES ")[2].splitlines() == ["2", *server_args]


def test_the_documented_image_has_the_ray_version_of_the_tests():
    lock = (ROOT / "requirements" / "dev.lock").read_text()
    version = re.search(r"^ray==(\S+)", lock, re.MULTILINE)[1]
    assert f"ray=={version}" in (ROOT / "docker" / "README.md").read_text()
