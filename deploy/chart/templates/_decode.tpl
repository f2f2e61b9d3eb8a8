{{/* Pods are spread by stage, and the stages of a pool are together: one node's failure stops only one pool. */}}
{{- define "baton.decodePod" -}}
metadata:
  {{- include "baton.podMetadata" . | nindent 2 }}
spec:
  topologySpreadConstraints:
    {{- include "baton.spread" "decode" | nindent 4 }}
      matchLabelKeys: [leaderworkerset.sigs.k8s.io/worker-index]
  affinity:
    podAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector:
              matchLabels:
                {{- include "baton.labels" "decode" | nindent 16 }}
            matchLabelKeys: [leaderworkerset.sigs.k8s.io/group-key]
    podAntiAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector:
              matchLabels:
                {{- include "baton.labels" "decode" | nindent 16 }}
            mismatchLabelKeys: [leaderworkerset.sigs.k8s.io/group-key]
  {{- include "baton.podSettings" . | nindent 2 }}
  containers:
    {{- include "baton.container" . | nindent 4 }}
  volumes:
    {{- include "baton.volumes" . | trim | nindent 4 }}
{{- end }}

{{/* One group is one decode pool, and one pod is one pipeline stage or a rank of one. */}}
{{- define "baton.decodeGroup" -}}
{{- $env := list
  (dict "name" "RANK" "value" "$(LWS_WORKER_INDEX)")
  (dict "name" "WORLD_SIZE" "value" "$(LWS_GROUP_SIZE)")
  (dict "name" "MASTER_ADDR" "value" "$(LWS_LEADER_ADDRESS)")
  (dict "name" "MASTER_PORT" "value" "7000") -}}
{{- $role := dict "root" . "name" "decode" "env" $env -}}
size: {{ .Values.decode.podsPerPool }}
# A replaced stage joins its leader again; the other stages keep their weights and continue to serve.
restartPolicy: None
leaderTemplate:
  {{- include "baton.decodePod" (merge (dict "service" "baton.v1.Decode") $role) | nindent 2 }}
# The other stages. All pods of a group are deleted at once: these continue until the leader ends their stream.
workerTemplate:
  {{- include "baton.decodePod" (merge (dict "service" "baton.v1.Pipeline") $role) | nindent 2 }}
{{- end }}
