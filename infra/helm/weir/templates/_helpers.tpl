{{- define "weir.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 48 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 48 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "weir.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "weir.labels" -}}
{{ include "weir.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "weir.image" -}}
{{- with .Values.image }}{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}{{ end }}
{{- end }}

{{/* Fields of every pod. */}}
{{- define "weir.pod" -}}
automountServiceAccountToken: {{ .usesCluster | default false }}
enableServiceLinks: false
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Fields of every container. */}}
{{- define "weir.container" -}}
image: {{ include "weir.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "weir.secretVariable" -}}
- name: {{ .variable }}
  valueFrom: {secretKeyRef: {name: {{ .secret.name }}, key: {{ .secret.key }}}}
{{- end }}

{{/* Variables of every container. HOME exists for any user id. */}}
{{- define "weir.environment" -}}
- {name: HOME, value: /tmp}
- {name: WEIR_HOME, value: /var/lib/weir/home}
{{ include "weir.secretVariable" (dict "variable" "WEIR_DATABASE_URL" "secret" .Values.database.secret) }}
- name: WEIR_RECEIPT_KEY_FILE
  value: {{ if .Values.receipts.secret.name }}/etc/weir/receipts/{{ .Values.receipts.secret.key }}{{ else }}"off"{{ end }}
{{- end }}

{{- define "weir.receiptMount" -}}
{{- if .Values.receipts.secret.name }}
- {name: receipts, mountPath: /etc/weir/receipts, readOnly: true}
{{- end }}
{{- end }}

{{- define "weir.receiptVolume" -}}
{{- if .Values.receipts.secret.name }}
- name: receipts
  secret: {secretName: {{ .Values.receipts.secret.name }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "weir.settings" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
