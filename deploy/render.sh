#!/usr/bin/env bash
# Write every overlay, rendered, into a folder (deploy/rendered unless one is given). Needs kubectl.
set -euo pipefail
cd "$(dirname "$0")"
out=${1:-rendered}
rules=components/monitoring/rules.yaml
{
    sed '/^  groups:$/q' "$rules"
    sed '1,/^groups:$/d; s/^./  &/' alerts/rules.yaml
} >"$rules.new"
cmp -s "$rules.new" "$rules" && rm "$rules.new" || mv "$rules.new" "$rules"
mkdir -p "$out"
for overlay in overlays/*/; do
    kubectl kustomize "$overlay" >"$out/$(basename "$overlay").yaml"
done
