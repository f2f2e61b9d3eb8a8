{{/* Labels of a component; selectors use the same. */}}
{{- define "baton.labels" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/component: {{ . }}
{{- end }}

{{/* Metadata of an object: a dict of root, name and, unless it belongs to no component, component. */}}
{{- define "baton.metadata" -}}
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  {{- with .component }}
  labels:
    {{- include "baton.labels" . | nindent 4 }}
  {{- end }}
{{- end }}

{{- define "baton.isWorker" -}}
{{- if has . (list "prefill" "decode" "worker") }}true{{ end }}
{{- end }}

{{- define "baton.image" -}}
{{- $image := .root.Values.image -}}
{{- $tag := $image.tag | default .root.Chart.AppVersion -}}
{{- if include "baton.isWorker" .name }}{{ $tag = $image.workerTag | default $tag }}{{ end -}}
{{ $image.repository }}:{{ $tag }}
{{- end }}

{{/* The text of baton.toml; pods carry its checksum, so that a change rolls them. */}}
{{- define "baton.config" -}}
{{ .Values.config | default (.Files.Get "files/baton.toml") }}
{{- end }}

{{/* Flags of a role, one list item a line. A dict of root, name and args: those that come first. */}}
{{- define "baton.args" -}}
{{- $values := .root.Values -}}
{{- $role := index $values .name -}}
{{- $args := .args -}}
{{- if include "baton.isWorker" .name -}}
{{- if $values.gpu.enabled }}{{ $args = concat $args (list "--device" "cuda" "--numerics" "fast") }}{{ end -}}
{{- with $values.transport.kind }}{{ $args = concat $args (list "--transport" .) }}{{ end -}}
{{- with $values.transport.interface }}{{ $args = concat $args (list "--transport-interface" .) }}{{ end -}}
{{- if and $values.nccl.enabled (eq .name "decode") }}{{ $args = concat $args (list "--stage-channel" "nccl") }}{{ end -}}
{{- end -}}
{{- if and $values.gateway.enabled (eq .name "router") -}}
{{- $args = concat $args (list "--vllm-engine" "--max-connection-age-s" "300") -}}
{{- end -}}
{{- if and $values.tls.enabled (ne .name "gateway") -}}
{{- $args = concat $args (list "--tls-cert" "/etc/baton-tls/tls.crt" "--tls-key" "/etc/baton-tls/tls.key" "--tls-ca" "/etc/baton-tls/ca.crt") -}}
{{- if eq .name "planner" -}}
{{- $args = concat $args (list "--token-file" "/etc/baton-token/token") -}}
{{- else -}}
{{- $args = concat $args (list "--health-listen" "0.0.0.0:7001") -}}
{{- end -}}
{{- if eq .name "router" -}}
{{- $args = concat $args (list "--client-certificates" "none" "--token-file" "/etc/baton-tokens/tokens" "--operator-tokens" "operator") -}}
{{- end -}}
{{- end -}}
{{- if and $values.tracing.endpoint (not (has .name (list "gateway" "planner"))) -}}
{{- $args = concat $args (list "--otel-endpoint" $values.tracing.endpoint) -}}
{{- end -}}
{{- if and $values.diskCache.claim (include "baton.isWorker" .name) -}}
{{- $args = concat $args (list "--disk-cache" "/var/cache/baton-disk") -}}
{{- end -}}
{{- if and $values.cacheServer.url (include "baton.isWorker" .name) -}}
{{- $args = concat $args (list "--cache-server" $values.cacheServer.url "--cache-server-key" "/etc/baton-cache/key") -}}
{{- end -}}
{{- if and $values.adapters.claim (include "baton.isWorker" .name) -}}
{{- $args = concat $args (list "--adapters" "/adapters") -}}
{{- end -}}
{{- range concat $args $role.args }}
- {{ toString . | quote }}
{{- end }}
{{- end }}

{{/* Environment of a role, one item a line; a dict of root, name and env: the items that come first. */}}
{{- define "baton.env" -}}
{{- $values := .root.Values -}}
{{- $env := .env | default list -}}
{{- if and (include "baton.isWorker" .name) $values.transport.ucxTls -}}
{{- $env = append $env (dict "name" "UCX_TLS" "value" $values.transport.ucxTls) -}}
{{- end -}}
{{- if and $values.nccl.enabled (eq .name "decode") -}}
{{- $env = append $env (dict "name" "NCCL_SOCKET_IFNAME" "value" "=eth0") -}}
{{- end -}}
{{- with concat $env (index $values .name).env }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/* Resources of a role; one device per worker where there are devices. */}}
{{- define "baton.resources" -}}
{{- $resources := deepCopy (index .root.Values .name).resources -}}
{{- if include "baton.isWorker" .name -}}
{{- $limits := $resources.limits | default dict -}}
{{- if .root.Values.gpu.enabled }}{{ $_ := set $limits "nvidia.com/gpu" "1" }}{{ end -}}
{{- with .root.Values.transport.resource }}{{ $_ := set $limits . "1" }}{{ end -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{ toYaml $resources }}
{{- end }}

{{/* Where /health is asked: a port of its own with TLS, which the kubelet's gRPC probes do not speak. */}}
{{- define "baton.probes" -}}
{{- $port := ternary 7001 7000 .root.Values.tls.enabled -}}
startupProbe:
  grpc:
    port: {{ $port }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ ternary 120 12 (eq (include "baton.isWorker" .name) "true") }}
livenessProbe:
  grpc:
    port: {{ $port }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc:
    port: {{ $port }}
    service: {{ .service }}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end }}

{{/* One item of a pod's spread: replicas of a component on different nodes, if there are several. */}}
{{- define "baton.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "baton.labels" . | nindent 6 }}
{{- end }}

{{/* Fields of a pod's spec that do not depend on its containers; a dict of root and name. */}}
{{- define "baton.podSettings" -}}
{{- $role := index .root.Values .name -}}
serviceAccountName: {{ .name }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ $role.gracePeriodSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $role.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := $role.tolerations -}}
{{- if and .root.Values.gpu.enabled (include "baton.isWorker" .name) -}}
{{- $tolerations = prepend $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") -}}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "baton.preStop" -}}
preStop:
  sleep:
    seconds: 5
{{- end }}

{{/* Metadata of a pod. */}}
{{- define "baton.podMetadata" -}}
{{- $role := index .root.Values .name -}}
labels:
  {{- include "baton.labels" .name | nindent 2 }}
{{- $annotations := deepCopy $role.podAnnotations -}}
{{- if ne .name "gateway" }}{{ $_ := set $annotations "checksum/config" (include "baton.config" .root | sha256sum) }}{{ end }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Mounts and volumes of a role: a dict of root and name. */}}
{{- define "baton.mounts" -}}
{{- $values := .root.Values -}}
- name: config
  mountPath: /etc/baton
  readOnly: true
{{- if ne .name "planner" }}
- name: tmp
  mountPath: /tmp
{{- end }}
{{- if include "baton.isWorker" .name }}
- name: kernels
  mountPath: /var/cache/baton
{{- end }}
{{- if eq .name "router" }}
- name: kubernetes-api
  mountPath: /var/run/secrets/kubernetes.io/serviceaccount
  readOnly: true
{{- end }}
{{- if and $values.model.claim (ne .name "planner") }}
- name: model
  mountPath: {{ $values.model.path }}
  readOnly: true
{{- end }}
{{- if $values.tls.enabled }}
- name: tls
  mountPath: /etc/baton-tls
  readOnly: true
{{- if eq .name "router" }}
- name: tokens
  mountPath: /etc/baton-tokens
  readOnly: true
{{- else if eq .name "planner" }}
- name: token
  mountPath: /etc/baton-token
  readOnly: true
{{- end }}
{{- end }}
{{- if and $values.diskCache.claim (include "baton.isWorker" .name) }}
- name: disk-cache
  mountPath: /var/cache/baton-disk
{{- end }}
{{- if and $values.cacheServer.url (include "baton.isWorker" .name) }}
- name: cache-server-key
  mountPath: /etc/baton-cache
  readOnly: true
{{- end }}
{{- if and $values.adapters.claim (include "baton.isWorker" .name) }}
- name: adapters
  mountPath: /adapters
  readOnly: true
{{- end }}
{{- end }}

{{- define "baton.volumes" -}}
{{- $values := .root.Values -}}
{{- if eq .name "router" }}
# A token that only permits reading EndpointSlices, replaced every hour.
- name: kubernetes-api
  projected:
    sources:
      - serviceAccountToken:
          path: token
          expirationSeconds: 3607
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
      - downwardAPI:
          items:
            - path: namespace
              fieldRef:
                fieldPath: metadata.namespace
{{- end }}
- name: config
  configMap:
    name: baton-config
{{- if ne .name "planner" }}
- name: tmp
  emptyDir:
    sizeLimit: 64Mi
{{- end }}
{{- if include "baton.isWorker" .name }}
- name: kernels
  {{- if $values.kernels.claim }}
  persistentVolumeClaim:
    claimName: {{ $values.kernels.claim }}
  {{- else }}
  emptyDir:
    sizeLimit: 512Mi
  {{- end }}
{{- end }}
{{- if and $values.model.claim (ne .name "planner") }}
- name: model
  persistentVolumeClaim:
    claimName: {{ $values.model.claim }}
    readOnly: true
{{- end }}
{{- if $values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ ternary "operator" .name (eq .name "planner") }}-tls
    defaultMode: 0440
{{- if eq .name "router" }}
- name: tokens
  secret:
    secretName: client-tokens
    defaultMode: 0440
{{- else if eq .name "planner" }}
- name: token
  secret:
    secretName: operator-token
    defaultMode: 0440
{{- end }}
{{- end }}
{{- if and $values.diskCache.claim (include "baton.isWorker" .name) }}
- name: disk-cache
  persistentVolumeClaim:
    claimName: {{ $values.diskCache.claim }}
{{- end }}
{{- if and $values.cacheServer.url (include "baton.isWorker" .name) }}
- name: cache-server-key
  secret:
    secretName: {{ $values.cacheServer.keySecret }}
    defaultMode: 0440
{{- end }}
{{- if and $values.adapters.claim (include "baton.isWorker" .name) }}
- name: adapters
  persistentVolumeClaim:
    claimName: {{ $values.adapters.claim }}
    readOnly: true
{{- end }}
{{- end }}

{{/* The container of a router or a worker: a dict of root, name, service (of the readiness probe), args and env. */}}
{{- define "baton.container" -}}
- name: {{ .name }}
  image: {{ include "baton.image" . }}
  {{- with .root.Values.image.pullPolicy }}
  imagePullPolicy: {{ . }}
  {{- end }}
  {{- $model := .root.Values.model }}
  {{- $first := list .name "--config" "/etc/baton/baton.toml" "--model" $model.path "--model-name" $model.name }}
  args:
    {{- include "baton.args" (merge (dict "args" (concat $first (.args | default list))) .) | nindent 4 }}
  {{- with include "baton.env" . }}
  env:
    {{- . | nindent 4 }}
  {{- end }}
  ports:
    - name: grpc
      containerPort: 7000
    - name: metrics
      containerPort: 9090
    {{- if .root.Values.tls.enabled }}
    - name: health
      containerPort: 7001
    {{- end }}
  {{- include "baton.probes" . | nindent 2 }}
  lifecycle:
    {{- include "baton.preStop" . | nindent 4 }}
  resources:
    {{- include "baton.resources" . | nindent 4 }}
  securityContext:
    {{- include "baton.containerSecurity" . | nindent 4 }}
  volumeMounts:
    {{- include "baton.mounts" . | nindent 4 }}
{{- end }}

{{/* A pod of a router or a worker with replicas: metadata and spec. */}}
{{- define "baton.pod" -}}
metadata:
  {{- include "baton.podMetadata" . | nindent 2 }}
spec:
  topologySpreadConstraints:
    {{- include "baton.spread" .name | nindent 4 }}
  {{- include "baton.podSettings" . | nindent 2 }}
  containers:
    {{- include "baton.container" . | nindent 4 }}
  volumes:
    {{- include "baton.volumes" . | trim | nindent 4 }}
{{- end }}

{{- define "baton.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
{{ include "baton.metadata" (dict "root" .root "name" .name) }}
automountServiceAccountToken: false
{{- end }}

{{/* A budget of a component: a dict of root, name and field. */}}
{{- define "baton.disruptionBudget" -}}
{{- if .root.Values.podDisruptionBudgets.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
{{ include "baton.metadata" (dict "root" .root "name" .name) }}
spec:
  {{ .field }}: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "baton.labels" .name | nindent 6 }}
{{- end }}
{{- end }}

{{/* A service on 7000: a dict of root, name, component, isHeadless and selector: further labels. */}}
{{- define "baton.service" -}}
apiVersion: v1
kind: Service
{{ include "baton.metadata" . }}
spec:
  {{- if .isHeadless }}
  clusterIP: None
  {{- end }}
  selector:
    {{- include "baton.labels" .component | nindent 4 }}
    {{- with .selector }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - name: grpc
      port: 7000
      targetPort: grpc
      appProtocol: {{ ternary "https" "kubernetes.io/h2c" .root.Values.tls.enabled }}
{{- end }}
