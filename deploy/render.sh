#!/usr/bin/env bash
# Render every overlay and example into a folder (default: deploy/rendered). Needs kubectl.
# RUNBOOKS is the address of docs/runbooks.md for the links of alerts.
set -euo pipefail
placeholder=https://baton.example.org/docs/runbooks.md
runbooks=${RUNBOOKS:-$placeholder}
out=$(mkdir -p "${1:-$(dirname "$0")/rendered}" && cd "${1:-$(dirname "$0")/rendered}" && pwd)
cd "$(dirname "$0")"
rules=components/monitoring/rules.yaml
{
    sed '/^  groups:$/q' "$rules"
    sed '1,/^groups:$/d; s/^./  &/' alerts/rules.yaml
} >"$rules.new"
cmp -s "$rules.new" "$rules" && rm "$rules.new" || mv "$rules.new" "$rules"
# What the chart reads must be inside it.
mkdir -p chart/files
for file in base/baton.toml alerts/rules.yaml; do
    cmp -s "$file" "chart/files/$(basename "$file")" || cp "$file" chart/files/
done
mkdir -p "$out/examples"
for overlay in overlays/*/ examples/*/; do
    folder=$out
    [[ $overlay == examples/* ]] && folder=$out/examples
    kubectl kustomize "$overlay" | sed "s|$placeholder|$runbooks|" >"$folder/$(basename "$overlay").yaml"
done
[[ $runbooks == "$placeholder" ]] || sed "s|$placeholder|$runbooks|" alerts/rules.yaml >"$out/alerts.yaml"
