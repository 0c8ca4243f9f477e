{{- define "hardpoint.name" -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "hardpoint.selector" -}}
app.kubernetes.io/name: hardpoint
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "hardpoint.labels" -}}
{{ include "hardpoint.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "hardpoint.secret" -}}
{{- if .Values.key.existingSecret -}}
{{ .Values.key.existingSecret }}
{{- else -}}
{{ include "hardpoint.name" . }}-key
{{- end -}}
{{- end -}}
