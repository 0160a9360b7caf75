#!/usr/bin/env bash
# netlab.sh - a two-tier lab network from network namespaces, veth pairs, bridges and tbf.
#
#   netlab.sh up              build it (removes an older one of the same prefix first)
#   netlab.sh down            remove it and end what still runs in it; safe to repeat
#   netlab.sh exec I CMD...   run CMD as host I: own network, hostname and /etc/hosts
#   netlab.sh rate            shape every link again from NIC/OVERSUB/UPLINK, live
#   netlab.sh bytes           byte counters of every port, seen from the switches
#   netlab.sh show            shapers, drops and backlog
#   netlab.sh check           push a bounded transfer over a leaf and over the spine, print the rates
#
# Bridges live in a namespace too: the root namespace gets no device, no address and no
# route, so nothing in the lab can reach anything outside it. Needs root, iproute2,
# util-linux; the kernel needs veth, bridge and sch_tbf (sch_netem is not needed).
#
# Settings, all from the environment (give the same ones to every sub-command):
#   P=nl         prefix of every name, so that several labs can stand side by side
#   N=4          hosts                   LEAVES=2   leaf switches
#   ORDER=leaf   hosts in blocks, a leaf after the other; alternating: host I on leaf I mod LEAVES
#   NIC=1000     Mbit/s of a host link   OVERSUB=4  leaf uplink = hosts per leaf * NIC / OVERSUB
#   UPLINK=      Mbit/s, instead of OVERSUB         (OVERSUB=0: one flat switch, no spine)
#   QMS=20       queue depth in ms       MTU=1500   CC=cubic   TCP congestion control
#   NET=10.77.0  first three octets of the lab's /24; host I is NET.(I+1)
set -euo pipefail
P=${P:-nl} N=${N:-4} LEAVES=${LEAVES:-2} ORDER=${ORDER:-leaf} NIC=${NIC:-1000} OVERSUB=${OVERSUB:-4} UPLINK=${UPLINK:-}
QMS=${QMS:-20} MTU=${MTU:-1500} CC=${CC:-cubic} NET=${NET:-10.77.0}

die() {
  echo "netlab: $*" >&2
  exit 2
}

[[ $P =~ ^[a-z0-9-]{1,40}$ ]] || die "P=$P: must be of small letters, digits and -"
for name in N LEAVES NIC OVERSUB QMS MTU; do
  [[ ${!name} =~ ^(0|[1-9][0-9]{0,5})$ ]] || die "$name=${!name}: must be a whole number"
done
((N >= 1 && N <= 250)) || die "N=$N: must be 1 to 250"
((LEAVES >= 1 && LEAVES <= N)) || die "LEAVES=$LEAVES: must be 1 to N=$N"
((NIC >= 1)) || die "NIC=$NIC: must be >= 1 Mbit/s"
[[ $ORDER == leaf || $ORDER == alternating ]] || die "ORDER=$ORDER: must be leaf or alternating"

PER=$(((N + LEAVES - 1) / LEAVES))
if [[ -n $UPLINK ]]; then
  UP=$UPLINK
elif ((OVERSUB == 0 || LEAVES == 1)); then
  UP=0 LEAVES=1 PER=$N
else
  UP=$((PER * NIC / OVERSUB))
  ((UP >= 1)) || die "OVERSUB=$OVERSUB: leaves less than 1 Mbit/s for an uplink"
fi
FAB=$P-fab

addr() { echo "$NET.$(($1 + 1))"; }
leaf() { if [[ $ORDER == leaf ]]; then echo $(($1 / PER)); else echo $(($1 % LEAVES)); fi; }

# Burst: 2 ms at line rate, 4 full frames at least.
tbf() { # Mbit/s
  local b=$(($1 * 250)) q=$(($1 * 125 * QMS)) least=$((4 * (MTU + 14)))
  ((b >= least)) || b=$least
  ((q >= 65536)) || q=65536
  echo "root tbf rate ${1}mbit burst $b limit $((b + q))"
}

shape() {
  local i l
  {
    for ((i = 0; i < N; i++)); do echo "qdisc replace dev h$i $(tbf "$NIC")"; done
    if ((UP)); then for ((l = 0; l < LEAVES; l++)); do
      echo "qdisc replace dev up$l $(tbf "$UP")" # leaf to spine
      echo "qdisc replace dev dn$l $(tbf "$UP")" # spine to leaf
    done; fi
  } | tc -n "$FAB" -batch -
  for ((i = 0; i < N; i++)); do
    # shellcheck disable=SC2046
    tc -n "$P-h$i" qdisc replace dev eth0 $(tbf "$NIC")
  done
}

# Every device carries single frames (gso_max_segs 1): a shaper lets a larger segment pass as one packet when it is below
# the burst, and counts its headers once, so that rates and byte counters would come out too good.
up() {
  local i j l
  ip netns add "$FAB"
  for ((i = 0; i < N; i++)); do ip netns add "$P-h$i"; done
  {
    echo "link set lo up"
    ((UP)) && printf '%s\n' "link add spine mtu $MTU type bridge" "link set spine up"
    for ((l = 0; l < LEAVES; l++)); do
      printf '%s\n' "link add leaf$l mtu $MTU type bridge" "link set leaf$l up"
      ((UP)) && printf '%s\n' "link add up$l mtu $MTU type veth peer name dn$l mtu $MTU" \
        "link set up$l gso_max_segs 1" "link set dn$l gso_max_segs 1" \
        "link set up$l master leaf$l up" "link set dn$l master spine up"
    done
    for ((i = 0; i < N; i++)); do
      printf '%s\n' "link add h$i mtu $MTU type veth peer name eth0 mtu $MTU netns $P-h$i" \
        "link set h$i gso_max_segs 1" "link set h$i master leaf$(leaf $i) up"
    done
  } | ip -n "$FAB" -batch -
  for ((i = 0; i < N; i++)); do
    # The per-namespace sysctl refuses cubic with EPERM; the same choice on a route is allowed.
    ip -n "$P-h$i" -batch - <<EOF
link set lo up
link set eth0 gso_max_segs 1
addr add $(addr $i)/24 dev eth0 noprefixroute
link set eth0 up
route add $NET.0/24 dev eth0 src $(addr $i) congctl $CC
EOF
    mkdir -p "/etc/netns/$P-h$i" # ip netns exec lays these over /etc
    {
      echo "127.0.0.1 localhost"
      for ((j = 0; j < N; j++)); do echo "$(addr $j) $P-h$j h$j"; done
    } >"/etc/netns/$P-h$i/hosts"
  done
  shape
}

down() {
  local ns pid
  for ns in $(ip netns list | awk -v p="$P" '$1 ~ "^" p "-(fab|h[0-9]+)$" {print $1}'); do
    for pid in $(ip netns pids "$ns"); do kill -KILL "$pid" 2>/dev/null || true; done
    ip netns del "$ns"
    rm -rf "/etc/netns/$ns"
  done
  rmdir /etc/netns 2>/dev/null || true
}

host() { # own UTS namespace, so that the hostname stands for the lab's address too
  local i=$1
  shift
  exec ip netns exec "$P-h$i" unshare --uts -- sh -c 'hostname "$0" && exec "$@"' "$P-h$i" "$@"
}

probe() { # from to: 1.5 s worth of bytes at NIC rate
  python3 - "$0" "$1" "$2" "$(addr "$2")" $((NIC * 187500)) <<'EOF'
import subprocess, sys
lab, src, dst, ip, size = *sys.argv[1:5], int(sys.argv[5])
recv = ("import socket,time\ns=socket.create_server(('',9099)); s.settimeout(10); print('up',flush=True)\n"
        "c,_=s.accept(); n=len(c.recv(1)); a=time.time()\n"
        "while b:=c.recv(1<<18): n+=len(b)\n"
        "print(n*8/(time.time()-a)/1e6)")
send = f"import socket; c=socket.create_connection(('{ip}',9099),5); c.sendall(bytes({size}))"
r = subprocess.Popen([lab, "exec", dst, sys.executable, "-c", recv], stdout=subprocess.PIPE, text=True)
r.stdout.readline()
subprocess.run([lab, "exec", src, sys.executable, "-c", send], timeout=60, check=True)
print(f"h{src} > h{dst}: {float(r.communicate(timeout=60)[0]):.0f} Mbit/s of payload")
EOF
}

usage() {
  sed -n '2,/^[^#]/{/^#/p}' "$0"
  exit 2
}

cmd=${1:-}
shift || true
[[ $cmd =~ ^(up|down|exec|rate|check|bytes|show)$ ]] || usage
((EUID == 0)) || die "needs root, to make network namespaces; try again with sudo"
for tool in ip tc unshare; do
  type -P "$tool" >/dev/null || die "needs the program $tool and finds none; on Debian or Ubuntu: apt-get install iproute2 util-linux"
done

case $cmd in
  up)
    down
    up
    ;;
  down) down ;;
  exec)
    [[ ${1:-} =~ ^[0-9]+$ && -n ${2:-} ]] || die "exec needs the number of a host and a command"
    [[ -e /run/netns/$P-h$1 ]] || die "there is no host $1 in lab $P; netlab.sh up makes it"
    host "$@"
    ;;
  rate) shape ;;
  check)
    echo "NIC $NIC Mbit/s, uplink $UP Mbit/s"
    probe 0 1
    probe 0 $((N - 1))
    ;;
  bytes) # the root's /sys shows other devices; ip netns exec lays the namespace's own over it
    # shellcheck disable=SC2016
    ip netns exec "$FAB" sh -c 'for d in /sys/class/net/h[0-9]* /sys/class/net/up[0-9]*; do
      [ -e "$d" ] && echo "$(basename "$d") in $(cat "$d"/statistics/rx_bytes) out $(cat "$d"/statistics/tx_bytes)"; done; true'
    ;;
  show) for ns in "$FAB" $(seq -f "$P-h%g" 0 $((N - 1))); do
    tc -n "$ns" -s qdisc show | sed -n "/tbf/,/backlog/s/^/$ns /p"
  done ;;
esac
