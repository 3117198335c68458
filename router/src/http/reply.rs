//! Responses with the right content type.

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;

use crate::openai::ApiError;

pub(super) fn json(status: StatusCode, body: String) -> Response {
    respond(status, "application/json", body)
}

pub(super) fn text(body: String) -> Response {
    respond(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", body)
}

pub(super) fn error(error: &ApiError) -> Response {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json(status, error.body());
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

fn respond(status: StatusCode, content_type: &'static str, body: String) -> Response {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
