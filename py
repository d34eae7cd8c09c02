#!/bin/bash
export PYTHONPATH=/work/h28/m_all/src
exec /work/main/.venv/bin/python "$@"
