#!/bin/sh
# Submit Snakemake's job script, the only argument, as a Kubernetes job, and print the job's name.
set -eu
kubectl create -o name -f - <<END
apiVersion: batch/v1
kind: Job
metadata:
  generateName: hyfreedp-
spec:
  backoffLimit: 0
  ttlSecondsAfterFinished: 86400
  template:
    spec:
      restartPolicy: Never
      containers:
        - name: cell
          image: ${HYFREEDP_IMAGE:-python:3.12}
          command: [sh, "$1"]
          workingDir: $PWD
          resources:
            limits: {nvidia.com/gpu: 1, cpu: 4, memory: 32Gi}
          volumeMounts: [{name: work, mountPath: ${HYFREEDP_MOUNT:-/hyfreedp}}]
      volumes:
        - name: work
          persistentVolumeClaim: {claimName: ${HYFREEDP_CLAIM:-hyfreedp}}
END
