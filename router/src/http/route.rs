//! The headers that ask for and report a route.

use axum::http::{HeaderMap, HeaderValue};

use crate::openai::ApiError;
use crate::policy::{Arm, Decision, Prefill};

pub(super) const REPORT: &str = "x-segue-route";
const OVERRIDE: &str = "x-segue-prefill";

/// The arm that the client asks for; without permission nobody asks.
pub(super) fn arm(headers: &HeaderMap, allowed: bool) -> Result<Option<Arm>, ApiError> {
    let Some(value) = headers.get(OVERRIDE).filter(|_| allowed) else { return Ok(None) };
    match value.to_str().unwrap_or_default().trim() {
        "local" => Ok(Some(Arm::Local)),
        "remote" => Ok(Some(Arm::Remote)),
        "auto" | "" => Ok(None),
        _ => {
            let message = "Invalid value for the header 'x-segue-prefill': expected local, remote or auto";
            Err(ApiError::invalid(OVERRIDE, message))
        }
    }
}

/// `local|remote; rule=…; decode=…; prefill=…; prompt=…; uncached=…; request=…`
pub(super) fn report(decision: &Decision, request_id: &str) -> Option<HeaderValue> {
    let (way, prefill) = match &decision.prefill {
        Prefill::Local => ("local", "-"),
        Prefill::Remote(names) => ("remote", names.first().map_or("-", String::as_str)),
    };
    let (rule, decode, estimates) = (decision.rule, &decision.decode, decision.estimates);
    let (prompt, uncached) = (estimates.prompt_tokens, estimates.uncached_tokens);
    let report = format!(
        "{way}; rule={rule}; decode={decode}; prefill={prefill}; prompt={prompt}; uncached={uncached}; \
         request={request_id}"
    );
    HeaderValue::from_str(&report).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Estimates;

    fn asked(value: &'static str, allowed: bool) -> Result<Option<Arm>, ApiError> {
        let mut headers = HeaderMap::new();
        headers.insert(OVERRIDE, HeaderValue::from_static(value));
        arm(&headers, allowed)
    }

    #[test]
    fn the_arm_is_read_only_where_allowed() {
        assert_eq!(asked("local", true), Ok(Some(Arm::Local)));
        assert_eq!(asked("remote", true), Ok(Some(Arm::Remote)));
        assert_eq!(asked("auto", true), Ok(None));
        assert_eq!(asked("sideways", true).unwrap_err().status, 400);
        assert_eq!(asked("local", false), Ok(None));
        assert_eq!(asked("sideways", false), Ok(None));
    }

    #[test]
    fn the_report_has_every_figure() {
        let estimates = Estimates { prompt_tokens: 9, uncached_tokens: 4, prefill_queue_tokens: 0 };
        let prefill = Prefill::Remote(vec!["p1".into(), "p0".into()]);
        let decision = Decision { decode: "d0".into(), prefill, rule: "long", estimates };
        assert_eq!(
            report(&decision, "r").unwrap(),
            "remote; rule=long; decode=d0; prefill=p1; prompt=9; uncached=4; request=r"
        );
    }
}
