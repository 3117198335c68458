//! The id of a request: the client's, if usable, else a new one.

use axum::http::HeaderMap;

pub(super) const HEADER: &str = "x-request-id";
const LENGTH_MAX: usize = 64;

/// Keeps letters, digits and `-_.` of the client's id: it goes into headers,
/// logs and messages between nodes.
pub(super) fn request_id(headers: &HeaderMap, random: u64) -> String {
    let given = headers.get(HEADER).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let usable = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let id: String = given.chars().filter(usable).take(LENGTH_MAX).collect();
    if id.is_empty() { format!("{random:016x}") } else { id }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn id(given: &'static str) -> String {
        let mut headers = HeaderMap::new();
        headers.insert(HEADER, HeaderValue::from_static(given));
        request_id(&headers, 7)
    }

    #[test]
    fn a_clients_id_is_cleaned_and_bounded() {
        assert_eq!(id("run-1_a.b"), "run-1_a.b");
        assert_eq!(id("a; b=c\"<x>"), "abcx");
        assert_eq!(id("abcdefghijabcdefghijabcdefghijabcdefghijabcdefghijabcdefghijabcdefghij").len(), 64);
    }

    #[test]
    fn without_a_usable_one_there_is_a_new_one() {
        assert_eq!(id("; ;"), "0000000000000007");
        assert_eq!(request_id(&HeaderMap::new(), 7), "0000000000000007");
    }
}
