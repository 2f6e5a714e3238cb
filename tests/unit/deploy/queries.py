"""The queries of the alerts and of the dashboard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

_DEPLOY = Path(__file__).parents[3] / "deploy"
RULES = _DEPLOY / "prometheus" / "rules.yml"
DASHBOARD = _DEPLOY / "grafana" / "dashboard.json"


def of_alerts() -> dict[str, str]:
    """Name of an alert to its query."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def of_dashboard(instances: str = ".*") -> dict[str, list[str]]:
    """Title of a panel to its queries, about some instances."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return {
        panel["title"]: [target["expr"].replace("$instance", instances) for target in panel["targets"]]
        for panel in dashboard["panels"]
    }
