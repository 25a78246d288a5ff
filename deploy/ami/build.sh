#!/bin/bash
# Turns a fresh instance into the image of Quartermaster's nodes. Run as root on Amazon Linux 2023 with NVIDIA's driver
# (the Deep Learning Base AMI "OSS Nvidia Driver" has it), on any instance type with a GPU of the kind it is for:
#
#   sudo deploy/ami/build.sh quartermaster_serve-*.whl [MODEL…]
#
# then make an image of the instance (deploy/README.md). Each MODEL of Hugging Face is baked in: a node that finds its
# weights in its image fetches none. What is fixed here is what every start would otherwise pay for.

set -euo pipefail
wheel=${1:?the wheel of quartermaster-serve}
shift
home=/opt/quartermaster

[ "$(id -u)" = 0 ] || { echo "run as root" >&2; exit 2; }
[ -f "$wheel" ] || { echo "$wheel: is not there; build it with: pip wheel --no-deps ." >&2; exit 2; }
nvidia-smi > /dev/null || { echo "no NVIDIA driver; start from the Deep Learning Base AMI" >&2; exit 2; }

dnf install -y -q python3.11 python3.11-devel gcc mdadm xfsprogs lustre-client docker nvidia-container-toolkit
nvidia-ctk runtime configure --runtime=docker
systemctl enable docker nvidia-persistenced

python3.11 -m venv "$home/venv"
"$home/venv/bin/pip" install -q "$wheel[vllm]"
"$home/venv/bin/python" -c 'import ray, vllm, serve_apps.node_agent'

if [ $# -gt 0 ]; then
  for model in "$@"; do
    HF_HOME="$home/baked-weights" "$home/venv/bin/python" -c \
      'import sys; from huggingface_hub import snapshot_download; snapshot_download(sys.argv[1])' "$model"
  done
fi

# Nothing of this machine may live on in the image.
cloud-init clean --logs
rm -rf ~/.cache /var/log/qm-node.log /etc/ssh/ssh_host_* /var/cache/dnf
echo "done: now make an image of this instance"
