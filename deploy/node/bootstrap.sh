# Makes an EC2 instance a Ray node of Quartermaster. Run as root by the user data of the launch template, which sets the
# QM_* variables before it. It ends in a raylet that carries the instance's labels, or the deadman ends the instance.
#
#   QM_CLUSTER QM_RAY_ADDRESS QM_TOKEN_SOURCE QM_IMAGE QM_WEIGHTS_FSX QM_WEIGHTS_S3 QM_SILENCE_S

set -uo pipefail
QM_ROOT=${QM_ROOT:-}                                # only a test sets it
QM_HOME=${QM_ROOT}/opt/quartermaster
QM_RUN=${QM_ROOT}/run/quartermaster
QM_UNITS=${QM_ROOT}/etc/systemd/system
QM_WEIGHTS=${QM_HOME}/weights                       # a Hugging Face cache: what HF_HOME names
QM_IMDS=${QM_IMDS:-http://169.254.169.254/latest}
export AWS_DEFAULT_REGION

say() { echo "qm-node: $*"; }                       # the console is what `qm run` quotes when the node never joins
die() { say "$*"; exit 1; }

imds() {                                            # a path below meta-data; empty when there is nothing there
  curl -sf -m 5 -H "X-aws-ec2-metadata-token: ${QM_IMDS_TOKEN}" "${QM_IMDS}/meta-data/$1" || true
}

who_am_i() {
  QM_IMDS_TOKEN=$(curl -sf -m 5 --retry 5 --retry-connrefused -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' \
    "${QM_IMDS}/api/token") || die "no answer from the metadata service"
  QM_INSTANCE_ID=$(imds instance-id)
  QM_INSTANCE_TYPE=$(imds instance-type)
  QM_ZONE=$(imds placement/availability-zone)
  QM_LIFE=$(imds instance-life-cycle)
  QM_OFFERING=$(imds tags/instance/qm:offering)
  QM_DEADLINE=$(imds tags/instance/qm:deadline-at-s)
  AWS_DEFAULT_REGION=$(imds placement/region)
  case "$QM_LIFE" in
    spot) QM_MARKET=spot ;;
    capacity-block) QM_MARKET=block ;;
    *) QM_MARKET=on_demand ;;
  esac
  [ -n "$QM_INSTANCE_ID" ] || die "the metadata service does not say who this instance is"
}

# First of all, so that nothing later can leave an instance running that serves nobody: once a minute it looks whether
# the hard deadline of the launch has passed, or nothing was heard of the cluster for too long (node_agent touches the
# file whenever the board took its report). A shutdown from inside terminates the instance.
deadman() {
  mkdir -p "$QM_RUN" "$QM_HOME/bin" "$QM_UNITS"
  touch "$QM_RUN/heartbeat"
  cat > "$QM_HOME/bin/deadman" <<EOF
#!/bin/bash
now=\$(date +%s)
heard=\$(stat -c %Y "$QM_RUN/heartbeat" 2>/dev/null || echo 0)
deadline="${QM_DEADLINE}"
end() { echo "qm-deadman: \$1"; shutdown -h now; exit 0; }
[ -n "\$deadline" ] && [ "\$now" -ge "\$deadline" ] && end "the hard deadline of the launch has passed"
[ \$((now - heard)) -gt ${QM_SILENCE_S} ] && end "nothing heard of the cluster for \$((now - heard)) s"
exit 0
EOF
  chmod 755 "$QM_HOME/bin/deadman"
  unit qm-deadman.service "[Service]" "Type=oneshot" "ExecStart=$QM_HOME/bin/deadman" "StandardOutput=journal+console"
  unit qm-deadman.timer "[Timer]" "OnBootSec=60" "OnUnitActiveSec=60" "AccuracySec=5" "[Install]" "WantedBy=timers.target"
  systemctl daemon-reload
  systemctl enable --now qm-deadman.timer || die "the deadman does not start"
}

unit() {                                            # a systemd unit: name, then its lines
  local name=$1
  shift
  printf '%s\n' "$@" > "$QM_UNITS/$name"
}

# Instance store, where there is some, as one file system: the fastest disk there is, and it costs nothing.
scratch() {
  local disks
  mapfile -t disks < <(lsblk -dpno NAME,MODEL | awk '/Instance Storage/ {print $1}')
  [ ${#disks[@]} -gt 0 ] || { say "no instance store"; return; }
  local disk=${disks[0]}
  if [ ${#disks[@]} -gt 1 ]; then
    disk=/dev/md0
    mdadm --create "$disk" --run --level=0 --raid-devices=${#disks[@]} "${disks[@]}" || { say "no RAID"; return; }
  fi
  mkfs.xfs -q -f "$disk" && mkdir -p "$QM_HOME/scratch" && mount -o noatime "$disk" "$QM_HOME/scratch" ||
    say "the instance store cannot be used"
}

# Weights from the first source that works: in the image (nothing to fetch), FSx for Lustre (read in place), S3 to disk.
weights() {
  if [ -d "$QM_HOME/baked-weights" ]; then
    ln -sfn "$QM_HOME/baked-weights" "$QM_WEIGHTS" && say "weights: in the image" && return
  fi
  if [ -n "${QM_WEIGHTS_FSX}" ]; then
    mkdir -p "$QM_HOME/fsx"
    if timeout 60 mount -t lustre -o noatime,flock "${QM_WEIGHTS_FSX}" "$QM_HOME/fsx"; then
      ln -sfn "$QM_HOME/fsx" "$QM_WEIGHTS" && say "weights: FSx" && return
    fi
    say "weights: FSx does not mount"
  fi
  if [ -n "${QM_WEIGHTS_S3}" ]; then
    local to=$QM_HOME/weights-from-s3
    [ -d "$QM_HOME/scratch" ] && to=$QM_HOME/scratch/weights
    mkdir -p "$to"
    aws configure set default.s3.max_concurrent_requests 64
    if aws s3 sync --only-show-errors "${QM_WEIGHTS_S3}" "$to"; then
      ln -sfn "$to" "$QM_WEIGHTS" && say "weights: S3" && return
    fi
    say "weights: S3 does not answer"
  fi
  mkdir -p "$QM_WEIGHTS"
  say "weights: none here; engines fetch their own"
}

# The token of the Ray cluster, from Secrets Manager (an ARN) or the SSM parameter of that name. Never on the console.
token() {
  [ -n "${QM_TOKEN_SOURCE}" ] || { say "the cluster has no token"; return; }
  local got
  case "$QM_TOKEN_SOURCE" in
    arn:*:secretsmanager:*)
      got=$(aws secretsmanager get-secret-value --secret-id "$QM_TOKEN_SOURCE" --query SecretString --output text) ;;
    *)
      got=$(aws ssm get-parameter --with-decryption --name "$QM_TOKEN_SOURCE" --query Parameter.Value --output text) ;;
  esac
  [ -n "$got" ] || die "the Ray token cannot be read from ${QM_TOKEN_SOURCE}; see the node's role"
  (umask 077 && printf '%s' "$got" > "$QM_RUN/ray-token")
}

# What runs on the node comes with the machine image, or in a container image that is pulled unless it is there already.
runner() {
  QM_BIN=$QM_HOME/venv/bin/
  [ -n "${QM_IMAGE}" ] || return 0
  if ! docker image inspect "$QM_IMAGE" > /dev/null 2>&1; then
    case "$QM_IMAGE" in
      *.dkr.ecr.*) aws ecr get-login-password | docker login -u AWS --password-stdin "${QM_IMAGE%%/*}" > /dev/null ;;
    esac
    docker pull -q "$QM_IMAGE" > /dev/null || die "the image ${QM_IMAGE} cannot be pulled"
  fi
  QM_BIN="/usr/bin/docker run --rm --gpus all --network host --ipc host --ulimit memlock=-1 --env-file $QM_RUN/env"
  QM_BIN="$QM_BIN -v $QM_HOME:$QM_HOME -v $QM_RUN:$QM_RUN -v /dev/kmsg:/dev/kmsg $QM_IMAGE "
}

# Ray's labels may hold letters, digits, dots, dashes and underscores.
label() { printf '%s' "$1" | tr -c 'A-Za-z0-9_.-' '_'; }

join() {
  local labels="qm-instance-id=${QM_INSTANCE_ID},qm-instance-type=$(label "$QM_INSTANCE_TYPE")"
  labels+=",qm-zone=$(label "$QM_ZONE"),qm-market=${QM_MARKET}"
  [ -n "$QM_OFFERING" ] && labels+=",qm-offering=$(label "$QM_OFFERING")"
  {
    echo "RAY_CLOUD_INSTANCE_ID=${QM_INSTANCE_ID}"
    echo "HF_HOME=$QM_WEIGHTS"
    echo "VLLM_NO_USAGE_STATS=1"
    if [ -f "$QM_RUN/ray-token" ]; then
      echo "RAY_AUTH_MODE=token"
      echo "RAY_AUTH_TOKEN_PATH=$QM_RUN/ray-token"
    fi
  } > "$QM_RUN/env"
  local start="start --address=${QM_RAY_ADDRESS} --labels=${labels} --disable-usage-stats --block"
  local agent="-m serve_apps.node_agent --instance-id ${QM_INSTANCE_ID} --imds --gpus --heartbeat $QM_RUN/heartbeat"
  unit qm-raylet.service "[Unit]" "After=network-online.target" "[Service]" "EnvironmentFile=$QM_RUN/env" \
    "ExecStart=${QM_BIN}ray $start" "Restart=on-failure" "RestartSec=5" "LimitNOFILE=1048576" "LimitMEMLOCK=infinity" \
    "StandardOutput=journal+console"
  unit qm-agent.service "[Unit]" "After=qm-raylet.service" "[Service]" "EnvironmentFile=$QM_RUN/env" \
    "ExecStart=${QM_BIN}python $agent" "Restart=always" "RestartSec=5" "StandardOutput=journal"
  systemctl daemon-reload
  systemctl start qm-raylet.service qm-agent.service || die "the raylet does not start"
  say "joined ${QM_RAY_ADDRESS} as ${QM_INSTANCE_ID} (${labels})"
}

who_am_i
deadman
scratch
weights
token
runner
join
