//! The HTTP surface: routes, bodies, headers. Decisions are made elsewhere.

pub(crate) mod bodies;
pub(crate) mod connections;
mod generate;
mod reply;
mod request_id;
mod route;
#[cfg(test)]
mod tests;
mod tools;

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::response::Response;
use axum::routing::{get, post};
use serde_json::{Value, json};
use tower_http::timeout::RequestBodyTimeoutLayer;

use crate::app::App;
use crate::clock;
use crate::openai::ApiError;
use crate::status::MeshStatus;

/// All routes of `app`.
pub(crate) fn routes(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/completions", post(generate::completion))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/tokenize", post(tools::tokenize))
        .route("/detokenize", post(tools::detokenize))
        .route("/health/live", get(async || reply::json(StatusCode::OK, "{\"status\":\"live\"}".into())))
        .route("/health/ready", get(ready))
        .route("/metrics", get(metrics))
        .route("/mesh/status", get(mesh_status))
        .fallback(async || reply::error(&ApiError::unknown_route()))
        .method_not_allowed_fallback(async || reply::error(&ApiError::wrong_method()))
        .layer(DefaultBodyLimit::max(app.body_bytes_max))
        .layer(from_fn_with_state(app.clone(), bodies::counted))
        .layer(RequestBodyTimeoutLayer::new(app.client_timeout))
        .with_state(app)
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let data: Vec<_> = app.model_ids().into_iter().map(|id| model_entry(&app, id)).collect();
    reply::json(StatusCode::OK, json!({ "object": "list", "data": data }).to_string())
}

/// Names of models hold slashes, so the rest of the path is the id.
async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Response {
    let ids = app.model_ids();
    match ids.iter().find(|known| **known == id) {
        Some(id) => reply::json(StatusCode::OK, model_entry(&app, id).to_string()),
        None => reply::error(&ApiError::unknown_model(&id, &ids)),
    }
}

fn model_entry(app: &App, id: &str) -> Value {
    json!({
        "id": id,
        "object": "model",
        // When the weights were made is not known; a constant keeps clients quiet.
        "created": 0,
        "owned_by": "segue",
        "max_model_len": app.context_tokens(),
    })
}

async fn ready(State(app): State<Arc<App>>) -> Response {
    let (status, word) = match (app.ready(), app.draining()) {
        (true, _) => (StatusCode::OK, "ready"),
        (false, true) => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
        (false, false) => (StatusCode::SERVICE_UNAVAILABLE, "no decode node is ready"),
    };
    reply::json(status, json!({ "status": word }).to_string())
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    reply::text(app.render_metrics())
}

async fn mesh_status(State(app): State<Arc<App>>) -> Response {
    let requests = app.requests_in_flight();
    let status = MeshStatus::new(clock::now(), &app.model.alias, app.draining(), requests, &app.registry());
    match serde_json::to_string(&status) {
        Ok(body) => reply::json(StatusCode::OK, body),
        Err(error) => reply::error(&ApiError::internal(error.to_string())),
    }
}
