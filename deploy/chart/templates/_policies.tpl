{{/* Pods of a component: a selector's labels. */}}
{{- define "baton.pods" -}}
podSelector:
  matchLabels:
    {{- include "baton.labels" . | nindent 4 }}
{{- end }}

{{/* Pods of several components. */}}
{{- define "baton.podsOf" -}}
podSelector:
  matchLabels:
    app.kubernetes.io/name: baton
  matchExpressions:
    - key: app.kubernetes.io/component
      operator: In
      values:
        {{- toYaml . | nindent 8 }}
{{- end }}

{{- define "baton.leaders" -}}
{{ include "baton.pods" "decode" }}
    leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}

{{/* The pods of kube-dns, and NodeLocal DNSCache, which listens on the node itself and is not a pod. */}}
{{- define "baton.toDns" -}}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: kube-system
      podSelector:
        matchLabels:
          k8s-app: kube-dns
    - ipBlock:
        cidr: {{ .Values.networkPolicies.nodeLocalDns }}
  ports:
    - protocol: UDP
      port: 53
    - protocol: TCP
      port: 53
{{- end }}

{{- define "baton.grpcPort" -}}
ports:
  - port: 7000
{{- end }}

{{- define "baton.transportPorts" -}}
ports:
  - port: 7300
    endPort: 7363
{{- end }}

{{- define "baton.redisPort" -}}
ports:
  - port: 6379
{{- end }}

{{/* The head of a policy: a dict of root and name. */}}
{{- define "baton.policy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
{{ include "baton.metadata" . }}
{{- end }}
